#!lua flags=allow-oom
-- A group could not handle a message: schedule it again for that group, or make it a dead letter. Only while it is the consumer's
-- own, and in one step with its acknowledgement. allow-oom: a consumer that could not say so would stand still with all that it has,
-- and what is not acknowledged can't be trimmed.
--
-- KEYS[1] stream    STREAM
-- KEYS[2] active    STRING  the consumer that has the turn in an ordered group
-- KEYS[3] counters  HASH
-- KEYS[4] topics    SET     topics that have a stream, dead letters or held messages
-- KEYS[5] buckets   ZSET    bucket_start_ms of every bucket that is not empty
-- KEYS[6] bucket    ZSET    member -> due_ms; of the next attempt
-- KEYS[7] dead      STREAM  of the topic
-- ARGV[1] group            string
-- ARGV[2] consumer         string
-- ARGV[3] ordered          int     1: the consumer must have the turn, too
-- ARGV[4] id               string  of the entry
-- ARGV[5] handed_out       int     how often it was handed out
-- ARGV[6] topic            string
-- ARGV[7] due_ms           int     of the next attempt
-- ARGV[8] bucket_start_ms  int     of KEYS[6]
-- ARGV[9] member           string  of the next attempt; "": there is none, it is a dead letter
-- ARGV[10] wake_channel    string
-- ARGV[11..] field, value, … of the dead letter
-- Returns OK, or LOST: it is not the consumer's (any more), and nothing was done
local stream, active, counters, topics, buckets, bucket, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local group, consumer, ordered, id, handed_out = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4], tonumber(ARGV[5])
local topic, due_ms, bucket_start_ms, member, wake_channel = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local FIRST_FIELD = 11

local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
if not pending or pending[4] ~= handed_out or (ordered and redis.call('GET', active) ~= consumer) then
  redis.call('HINCRBY', counters, 'stale_acks', 1)
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
  redis.call('HINCRBY', counters, 'dead', 1)
end
redis.call('XACK', stream, group, id)
return 'OK'
