#!lua flags=allow-oom
-- Read new messages of an ordered group, if the consumer is active.
--
-- KEYS[1] stream  STREAM
-- KEYS[2] active  STRING  the active consumer
-- ARGV[1] group     string
-- ARGV[2] consumer  string
-- ARGV[3] limit     int     messages, at most
-- Returns {entry id, {field, value, …}}, … or nothing
local stream, active = KEYS[1], KEYS[2]
local group, consumer, limit = ARGV[1], ARGV[2], ARGV[3]

if redis.call('GET', active) ~= consumer then
  return {}
end
local found = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', limit, 'STREAMS', stream, '>')
return found and found[1][2] or {}
