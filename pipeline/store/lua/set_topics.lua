#!lua flags=allow-oom
-- Say what counts for topics in one shard, unless something newer is said there. allow-oom: a loop that starts on a server that is full must
-- be able to say what it goes by, as it frees memory.
--
-- KEYS[1] topic_settings  HASH  topic, or * for all topics -> settings as a JSON object
-- KEYS[2] meta            HASH
-- ARGV[1] known     int  the highest revision that may be overwritten
-- ARGV[2] revision  int  of what is said now
-- ARGV[3..] topic, settings: all that there are
-- Returns 1, or 0 if nothing was done
local topic_settings, meta = KEYS[1], KEYS[2]

if tonumber(redis.call('HGET', meta, 'topics_revision') or '0') > tonumber(ARGV[1]) then
  return 0
end
redis.call('DEL', topic_settings)
for at = 3, #ARGV, 2 do
  redis.call('HSET', topic_settings, ARGV[at], ARGV[at + 1])
end
redis.call('HSET', meta, 'topics_revision', ARGV[2])
return 1
