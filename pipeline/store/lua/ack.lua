#!lua flags=allow-oom
-- Forget the first messages of a claim: they are delivered. Only the holder of an unexpired lease can, and saying it twice counts once.
--
-- KEYS[1] claims    ZSET  lease token -> lease_until_ms
-- KEYS[2] claim     LIST  member, due_ms, … of this token, without what is acknowledged
-- KEYS[3] attempts  HASH  message_id -> claims that ended without acknowledgement
-- KEYS[4] ids       ZSET  caller's id -> epoch ms at which it is forgotten
-- KEYS[5] counters  HASH
-- ARGV[1] lease_token   string
-- ARGV[2] claimed       int   messages in the claim when it was made
-- ARGV[3] delivered     int   messages delivered since then, from its beginning
-- ARGV[4] id_memory_ms  int   how long a caller's id is known after its message was delivered
-- ARGV[5] now_ms        int   "" means the server's clock; tests pass their own
-- ARGV[6..] caller's ids of the messages that this call acknowledges
-- Returns {"OK", acknowledged by this call} or {"LOST", 0}: the lease is over, the messages are somebody else's
local claims, claim, attempts, ids, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lease_token, claimed, delivered = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local id_memory_ms, now_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
if not now_ms then
  local time = redis.call('TIME')
  now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local FIRST_ID, FORGET_LIMIT, MESSAGE_ID_LENGTH = 6, 1000, 22

local lease_until_ms = redis.call('ZSCORE', claims, lease_token)
if not lease_until_ms or tonumber(lease_until_ms) <= now_ms then
  redis.call('HINCRBY', counters, 'stale_acks', 1)
  return {'LOST', 0}
end

local before = claimed - redis.call('LLEN', claim) / 2
local count = delivered - before
if count > 0 then
  if redis.call('EXISTS', attempts) == 1 then
    local rows = redis.call('LRANGE', claim, 0, 2 * count - 1)
    for index = 1, #rows, 2 do
      redis.call('HDEL', attempts, string.sub(rows[index], 1, MESSAGE_ID_LENGTH))
    end
  end
  for index = FIRST_ID, #ARGV do
    redis.call('ZADD', ids, 'XX', string.format('%.0f', now_ms + id_memory_ms), ARGV[index])
  end
  if #ARGV >= FIRST_ID then
    local forgotten = redis.call('ZRANGE', ids, '-inf', string.format('%.0f', now_ms), 'BYSCORE', 'LIMIT', 0, FORGET_LIMIT)
    if #forgotten > 0 then
      redis.call('ZREM', ids, unpack(forgotten))
    end
  end
  redis.call('HINCRBY', counters, 'delivered', count)
  redis.call('LTRIM', claim, 2 * count, -1)
end
if delivered == claimed then
  redis.call('ZREM', claims, lease_token)
end
return {'OK', math.max(count, 0)}
