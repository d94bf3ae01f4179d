#!lua
-- Schedule a dead letter again, in one step with its end as a dead letter. Its id leads to it again, unless another message waits with
-- that id by now.
--
-- KEYS[1] dead     STREAM
-- KEYS[2] buckets  ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[3] bucket   ZSET  member -> due_ms
-- KEYS[4] places   HASH  idempotency key -> place, see include/places.lua
-- KEYS[5] ids      ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[6] dead_topics  SET  topics that have dead letters
-- ARGV[1] id               string  of the dead letter's entry
-- ARGV[2] due_ms           int
-- ARGV[3] bucket_start_ms  int     of KEYS[3]
-- ARGV[4] member           string
-- ARGV[5] wake_channel     string
-- ARGV[6] name             string  the id of the message; "" if it is for one group, as its id says what became of it for all
-- ARGV[7] topic            string
-- Returns 1, or 0 if there is no such dead letter (any more), and nothing was done
--
-- include common
-- include places
-- include dead
local dead, buckets, bucket, places, ids, dead_topics = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id, due_ms, bucket_start_ms, member, wake_channel, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local topic = ARGV[7]

if not redis.call('XRANGE', dead, id, id)[1] then
  return 0
end
redis.call('ZADD', bucket, due_ms, member)
redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)
if name ~= '' and redis.call('HSETNX', places, name, place_of(member, due_ms)) == 1 then
  redis.call('ZREM', ids, name) -- it waits, so it is not delivered
end
redis.call('PUBLISH', wake_channel, due_ms)
redis.call('XDEL', dead, id)
forget_if_none_dead(dead, dead_topics, topic)
return 1
