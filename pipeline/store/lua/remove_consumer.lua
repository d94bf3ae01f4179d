#!lua flags=allow-oom
-- Forget a consumer of a group that has nothing pending.
--
-- KEYS[1] stream  STREAM
-- ARGV[1] group     string
-- ARGV[2] consumer  string
-- Returns 1 if it is forgotten, 0 if it has something pending, which others can take over
local stream = KEYS[1]
local group, consumer = ARGV[1], ARGV[2]

if redis.call('XPENDING', stream, group, '-', '+', 1, consumer)[1] then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
return 1
