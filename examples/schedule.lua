-- Schedule one message, as docs/wire-format.md describes it, and wake the loops if it is due before everything else.
--
-- KEYS[1] {N:S}:bucket:<bucket_start_ms>
-- KEYS[2] {N:S}:buckets
-- ARGV[1] due_ms           epoch milliseconds UTC
-- ARGV[2] bucket_start_ms  due_ms - due_ms mod 600000
-- ARGV[3] member           22 characters of an id, m and the message, or j and a JSON object
-- ARGV[4] {N:S}:wake
-- Returns 1 if the message is new, 0 if the same member was there
local added = redis.call('ZADD', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[2])
if redis.call('ZRANGE', KEYS[2], 0, 0)[1] == ARGV[2] and redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[3] then
  redis.call('PUBLISH', ARGV[4], ARGV[1])
end
return added
