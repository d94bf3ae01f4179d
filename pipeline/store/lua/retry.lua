#!lua flags=allow-oom
-- A group could not handle a message: schedule a retry for that group, or make it a dead letter. Refused unless the message is the
-- consumer's own; in one step with its acknowledgement. allow-oom: without it a consumer would stand still with all that it has, and
-- what is not acknowledged can't be trimmed.
--
-- KEYS[1] stream    STREAM
-- KEYS[2] active    STRING  the active consumer of an ordered group
-- KEYS[3] groups    HASH    group -> ordered or shared, of the topic
-- KEYS[4] counters  HASH
-- KEYS[5] topics    SET     topics that have a stream, dead letters or held messages
-- KEYS[6] buckets   ZSET    bucket_start_ms of every bucket that is not empty
-- KEYS[7] bucket    ZSET    member -> due_ms; of the next attempt
-- KEYS[8] dead      STREAM  of the topic
-- KEYS[9] dead_topics  SET  topics that have dead letters
-- ARGV[1] group            string
-- ARGV[2] consumer         string
-- ARGV[3] id               string  of the entry
-- ARGV[4] delivery_count   int     how often it was delivered
-- ARGV[5] topic            string
-- ARGV[6] due_ms           int     of the next attempt
-- ARGV[7] bucket_start_ms  int     of KEYS[7]
-- ARGV[8] member           string  of the next attempt; "": there is none, it is a dead letter
-- ARGV[9] wake_channel     string
-- ARGV[10..] field, value, … of the dead letter
-- Returns OK, or LOST: it is not the consumer's (any more), and nothing was done
local stream, active, groups, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local topics, buckets, bucket, dead, dead_topics = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local group, consumer, id, delivery_count = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local topic, due_ms, bucket_start_ms, member, wake_channel = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local FIRST_FIELD = 10

local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
local is_active = redis.call('HGET', groups, group) ~= 'ordered' or redis.call('GET', active) == consumer
if not pending or pending[4] ~= delivery_count or not is_active then
  redis.call('HINCRBY', counters, 'late_acks', 1)
  return 'LOST'
end
if member ~= '' then
  redis.call('ZADD', bucket, due_ms, member)
  redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)
  local is_oldest_bucket = redis.call('ZRANGE', buckets, 0, 0)[1] == bucket_start_ms
  if is_oldest_bucket and redis.call('ZRANGE', bucket, 0, 0)[1] == member then
    redis.call('PUBLISH', wake_channel, due_ms)
  end
else
  redis.call('XADD', dead, '*', unpack(ARGV, FIRST_FIELD))
  redis.call('SADD', topics, topic)
  redis.call('SADD', dead_topics, topic)
  redis.call('HINCRBY', counters, 'dead', 1)
end
redis.call('XACK', stream, group, id)
return 'OK'
