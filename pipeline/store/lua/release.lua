#!lua flags=allow-oom
-- Give what is left of a claim back, each message to its bucket: its holder stops, or its lease is over and another loop takes it back.
-- The keys of the buckets are built here, of the same shard: what was held is of others than the bucket of the claim.
--
-- KEYS[1] claims    ZSET  lease token -> lease_until_ms
-- KEYS[2] claim     LIST  member, due_ms, … of this token, without what is acknowledged
-- KEYS[3] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[4] attempts  HASH  message_id -> claims that ended without acknowledgement
-- KEYS[5] counters  HASH
-- ARGV[1] lease_token      string
-- ARGV[2] lease_until_ms   int     of the claim that was made: its holder gives back at once; "" of a finder: only what has expired
-- ARGV[3] claimed          int     messages in the claim when it was made; 0 of a finder, who can't know
-- ARGV[4] delivered        int     messages from the claim's beginning that may have been delivered: their attempt counts
-- ARGV[5] now_ms           int     "" means the server's clock; tests pass their own
-- Returns {"OK", messages given back} or {"LOST", 0}: there is no such claim (any more), or it has not expired
--
-- include common
local claims, claim, buckets, attempts, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lease_token, lease_until_ms = ARGV[1], tonumber(ARGV[2])
local claimed, delivered, now_ms = tonumber(ARGV[3]), tonumber(ARGV[4]), clock_ms(ARGV[5])
local shard = string.sub(buckets, 1, -#'buckets' - 1) -- what all keys of the shard begin with

local held_until_ms = tonumber(redis.call('ZSCORE', claims, lease_token) or '')
local by_finder = not lease_until_ms
local lost = held_until_ms ~= lease_until_ms -- a late request can have made another claim under this token
if by_finder then
  lost = not held_until_ms or held_until_ms > now_ms
end
if lost then
  return {'LOST', 0}
end

local rows = redis.call('LRANGE', claim, 0, -1)
local unacknowledged = delivered - (claimed - #rows / 2)
local last_start
for index = 1, #rows, 2 do
  local start = bucket_start(tonumber(rows[index + 1]))
  redis.call('ZADD', shard .. 'bucket:' .. start, rows[index + 1], rows[index])
  if start ~= last_start then
    redis.call('ZADD', buckets, start, start)
    last_start = start
  end
  if by_finder or (index + 1) / 2 <= unacknowledged then
    redis.call('HINCRBY', attempts, string.sub(rows[index], 1, MESSAGE_ID_LENGTH), 1)
  end
end
redis.call('UNLINK', claim)
redis.call('ZREM', claims, lease_token)
if by_finder then
  redis.call('HINCRBY', counters, 'reclaimed', #rows / 2)
end
return {'OK', #rows / 2}
