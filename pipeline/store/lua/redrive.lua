#!lua
-- Schedule a dead letter again, in one step with its end as a dead letter.
--
-- KEYS[1] dead     STREAM
-- KEYS[2] buckets  ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[3] bucket   ZSET  member -> due_ms
-- ARGV[1] id               string  of the dead letter's entry
-- ARGV[2] due_ms           int
-- ARGV[3] bucket_start_ms  int     of KEYS[3]
-- ARGV[4] member           string
-- ARGV[5] wake_channel     string
-- Returns 1, or 0 if there is no such dead letter (any more), and nothing was done
local dead, buckets, bucket = KEYS[1], KEYS[2], KEYS[3]
local id, due_ms, bucket_start_ms, member, wake_channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if not redis.call('XRANGE', dead, id, id)[1] then
  return 0
end
redis.call('ZADD', bucket, due_ms, member)
redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)
redis.call('PUBLISH', wake_channel, due_ms)
redis.call('XDEL', dead, id)
return 1
