#!lua flags=allow-oom
-- Give what is left of a claim back to its bucket: its holder stops, or its lease is over and another loop takes it back.
--
-- KEYS[1] claims    ZSET  lease token -> lease_until_ms
-- KEYS[2] claim     LIST  member, due_ms, … of this token, without what is acknowledged
-- KEYS[3] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[4] bucket    ZSET  member -> due_ms; a claim is of one bucket
-- KEYS[5] attempts  HASH  message_id -> claims that ended without acknowledgement
-- KEYS[6] counters  HASH
-- ARGV[1] lease_token      string
-- ARGV[2] bucket_start_ms  int     of KEYS[4]
-- ARGV[3] lease_until_ms   int     of the claim that was made: its holder gives back at once; "" of a finder: only what has expired
-- ARGV[4] claimed          int     messages in the claim when it was made; 0 of a finder, who can't know
-- ARGV[5] delivered        int     messages from the claim's beginning that may have been delivered: their attempt counts
-- ARGV[6] now_ms           int     "" means the server's clock; tests pass their own
-- Returns {"OK", messages given back} or {"LOST", 0}: there is no such claim (any more), or it has not expired
--
-- include common
local claims, claim, buckets, bucket, attempts, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local lease_token, bucket_start_ms, lease_until_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local claimed, delivered, now_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), clock_ms(ARGV[6])

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
for index = 1, #rows, 2 do
  redis.call('ZADD', bucket, rows[index + 1], rows[index])
  if by_finder or (index + 1) / 2 <= unacknowledged then
    redis.call('HINCRBY', attempts, string.sub(rows[index], 1, MESSAGE_ID_LENGTH), 1)
  end
end
if #rows > 0 then
  redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)
end
redis.call('UNLINK', claim)
redis.call('ZREM', claims, lease_token)
if by_finder then
  redis.call('HINCRBY', counters, 'reclaimed', #rows / 2)
end
return {'OK', #rows / 2}
