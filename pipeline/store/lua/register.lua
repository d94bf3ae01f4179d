#!lua flags=allow-oom
-- Make a group known in one shard, with the streams that it reads, and what kind of group it is. What is known already stays.
-- allow-oom: what consumes frees memory, so it must be able to start on a server that is full.
--
-- KEYS[1] stream  STREAM  of the topic
-- KEYS[2] retry   STREAM  of the topic for this group
-- KEYS[3] topics  SET     topics that have a stream, dead letters or held messages
-- KEYS[4] groups  HASH    group -> ordered or shared, of the topic
-- ARGV[1] topic  string
-- ARGV[2] group  string
-- ARGV[3] start  string  the entry after which a new group begins
-- ARGV[4] kind   string  ordered or shared; "": as the group is, and shared if it is new
-- Returns {kind of the group, 1 if it is new}; nothing was done if the kind is another than the caller's
local stream, retry, topics, groups = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local topic, group, start, kind = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local known = redis.call('HGET', groups, group)
if known and kind ~= '' and kind ~= known then
  return {known, 0}
end

local function create(key, first)
  local reply = redis.pcall('XGROUP', 'CREATE', key, group, first, 'MKSTREAM')
  if not reply.err then
    return true
  end
  local message = tostring(reply.err) -- in the memory of a test it is no string
  if not string.find(message, 'BUSYGROUP', 1, true) then
    error(message)
  end
  return false
end

-- Nobody else has read what is retried for this group: a new one gets all of it.
local is_new = create(stream, start)
is_new = create(retry, '0-0') or is_new
redis.call('SADD', topics, topic)
if not known then
  known = kind == 'ordered' and kind or 'shared'
  redis.call('HSET', groups, group, known)
end
return {known, is_new and 1 or 0}
