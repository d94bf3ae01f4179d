-- Schedule one message with an idempotency key: a key that is known stores nothing. docs/wire-format.md has this script, too.
--
-- KEYS[1] {N:S}:bucket:<bucket_start_ms>
-- KEYS[2] {N:S}:buckets
-- KEYS[3] {N:S}:places
-- KEYS[4] {N:S}:ids
-- KEYS[5] {N:S}:cancelled
-- ARGV[1] due_ms           epoch milliseconds UTC
-- ARGV[2] bucket_start_ms  due_ms - due_ms mod 600000
-- ARGV[3] member           22 characters of an id, j and a JSON object whose "id" is the key
-- ARGV[4] {N:S}:wake
-- ARGV[5] the key
-- Returns 1 if the message is scheduled now, 0 if the key was known: the first message with it counts
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
for _, known in ipairs({KEYS[4], KEYS[5]}) do -- delivered, or cancelled, and not forgotten yet
  if tonumber(redis.call('ZSCORE', known, ARGV[5]) or 0) > now_ms then
    return 0
  end
end
if redis.call('HSETNX', KEYS[3], ARGV[5], string.sub(ARGV[3], 1, 22) .. ARGV[1]) == 0 then
  return 0 -- it waits
end
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[2])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return 1
