#!lua flags=allow-oom
-- Drop a dead letter for good.
--
-- KEYS[1] dead         STREAM
-- KEYS[2] dead_topics  SET     topics that have dead letters
-- ARGV[1] id     string  of the dead letter's entry
-- ARGV[2] topic  string
-- Returns 1, or 0 if there is no such dead letter (any more)
--
-- include dead
local dead, dead_topics = KEYS[1], KEYS[2]
local id, topic = ARGV[1], ARGV[2]

local done = redis.call('XDEL', dead, id)
forget_if_none_dead(dead, dead_topics, topic)
return done
