#!lua flags=allow-oom
-- Let drain loops look at what is held of a topic, unless it is paused; each claim takes what its rate limit allows then.
--
-- KEYS[1] pauses       HASH  topic -> epoch ms since when it is paused
-- KEYS[2] held         ZSET  member -> due_ms, of the topic
-- KEYS[3] held_topics  ZSET  topic -> epoch ms at which the next message that is held of it may go, of topics that are not paused
-- ARGV[1] topic         string
-- ARGV[2] ends_pause    int     1: first end its pause, if it has one, and wake the loops
-- ARGV[3] wake_channel  string
-- Returns how many messages are held of it, 0 if it is paused
--
local pauses, held, held_topics = KEYS[1], KEYS[2], KEYS[3]
local topic, ends_pause, wake_channel = ARGV[1], ARGV[2] == '1', ARGV[3]

local count = redis.call('ZCARD', held)
if ends_pause then
  redis.call('HDEL', pauses, topic)
end
if count == 0 or redis.call('HEXISTS', pauses, topic) == 1 then
  return 0
end
redis.call('ZADD', held_topics, 0, topic)
if ends_pause then
  redis.call('PUBLISH', wake_channel, '0')
end
return count
