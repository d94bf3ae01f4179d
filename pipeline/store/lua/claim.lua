#!lua flags=allow-oom
-- Take the oldest due messages of one bucket in flight, under a lease. Asking again with the same token gives the same messages,
-- so a lost reply costs nothing. allow-oom: a server that is full must still be able to get rid of messages.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] bucket    ZSET  member -> due_ms; the bucket that the caller takes for the oldest
-- KEYS[3] claims    ZSET  lease token -> lease_until_ms
-- KEYS[4] claim     LIST  member, due_ms, … of this token
-- KEYS[5] attempts  HASH  message_id -> claims that ended without acknowledgement
-- ARGV[1] bucket_start_ms  int     of KEYS[2]
-- ARGV[2] lease_token      string
-- ARGV[3] claim_limit      int     messages, at most
-- ARGV[4] claim_bytes_max  int     bytes of members after which the claim is full
-- ARGV[5] lease_ms         int
-- ARGV[6] now_ms           int     "" means the server's clock; tests pass their own
-- Returns {status, now_ms, first lease_until_ms of all claims or "", detail, rows, attempts}
--   OK      rows are member, due_ms, …; attempts are one number a message, or empty if all are 0; detail is lease_until_ms
--   WAIT    nothing is due; detail is the next due_ms
--   BUCKET  another bucket is the oldest; detail is its bucket_start_ms: ask again for that one
--   EMPTY   nothing is scheduled; detail is ""
local buckets, bucket, claims, claim, attempts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local bucket_start_ms, lease_token = ARGV[1], ARGV[2]
local claim_limit, claim_bytes_max, lease_ms = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now_ms = tonumber(ARGV[6])
if not now_ms then
  local time = redis.call('TIME')
  now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local PAGE = 100 -- messages a step, so that claim_bytes_max is passed by one page at most
local MESSAGE_ID_LENGTH = 22

local TIME_MAX = 2 ^ 53 -- a ZADD by hand may hold any score; beyond this no time is exact

local function text(number)
  return string.format('%.0f', math.min(math.max(number, -TIME_MAX), TIME_MAX))
end

local function due_text(score)
  -- The usual score stands as it is: writing each of 500 anew took a quarter of the script's time.
  return #score < 16 and string.find(score, '^%d+$') and score or text(tonumber(score))
end

local function reply(status, detail, rows)
  local first_lease = redis.call('ZRANGE', claims, 0, 0, 'WITHSCORES')[2]
  local tried = {}
  if rows and redis.call('EXISTS', attempts) == 1 then
    for index = 1, #rows, 2 do
      tried[#tried + 1] = redis.call('HGET', attempts, string.sub(rows[index], 1, MESSAGE_ID_LENGTH)) or '0'
    end
  end
  return {status, text(now_ms), first_lease and text(tonumber(first_lease)) or '', detail, rows or {}, tried}
end

local held_until = redis.call('ZSCORE', claims, lease_token)
if held_until then
  return reply('OK', text(tonumber(held_until)), redis.call('LRANGE', claim, 0, -1))
end

local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
if not oldest then
  return reply('EMPTY', '')
end
if oldest ~= bucket_start_ms then
  return reply('BUCKET', oldest)
end

local rows, count, bytes = {}, 0, 0
while count < claim_limit and bytes < claim_bytes_max do
  local page = redis.call('ZRANGE', bucket, '-inf', text(now_ms), 'BYSCORE',
    'LIMIT', count, math.min(PAGE, claim_limit - count), 'WITHSCORES')
  if #page == 0 then
    break
  end
  for index = 1, #page, 2 do
    local member = page[index]
    bytes, count = bytes + #member, count + 1
    rows[2 * count - 1], rows[2 * count] = member, due_text(page[index + 1])
  end
end

if count == 0 then
  local head = redis.call('ZRANGE', bucket, 0, 0, 'WITHSCORES')
  if head[2] then
    return reply('WAIT', text(tonumber(head[2])))
  end
  redis.call('ZREM', buckets, bucket_start_ms)
  oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
  return reply(oldest and 'BUCKET' or 'EMPTY', oldest or '')
end

-- First where the messages go to, then where they come from: an error between the two can repeat them, not lose them.
for first = 1, 2 * count, 2 * PAGE do
  redis.call('RPUSH', claim, unpack(rows, first, math.min(first + 2 * PAGE - 1, 2 * count)))
end
local lease_until_ms = text(now_ms + lease_ms)
redis.call('ZADD', claims, lease_until_ms, lease_token)
redis.call('ZREMRANGEBYRANK', bucket, 0, count - 1) -- the lowest scores are the lowest ranks
if redis.call('EXISTS', bucket) == 0 then
  redis.call('ZREM', buckets, bucket_start_ms)
end
return reply('OK', lease_until_ms, rows)
