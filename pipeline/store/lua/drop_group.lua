#!lua flags=allow-oom
-- Forget a group in one shard, with what it has not handled: its pending messages and those that are to be retried.
--
-- KEYS[1] stream  STREAM  of the topic
-- KEYS[2] retry   STREAM  of the topic for this group
-- KEYS[3] active  STRING  the active consumer of an ordered group
-- KEYS[4] groups  HASH    group -> ordered or shared, of the topic
-- ARGV[1] group  string
-- Returns 1, or 0 if there was no such group
local stream, retry, active, groups = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group = ARGV[1]

local found = redis.call('HDEL', groups, group) + redis.call('DEL', retry, active)
if redis.call('EXISTS', stream) == 1 then
  found = found + redis.call('XGROUP', 'DESTROY', stream, group)
end
return found > 0 and 1 or 0
