#!lua flags=allow-oom
-- Drop the oldest entries of a stream: those beyond its length or age that every group has read and acknowledged. So many at
-- a time, and whole nodes of the stream only, so that it may keep some more.
--
-- KEYS[1] stream  STREAM
-- ARGV[1] retain_messages  int  0: all
-- ARGV[2] oldest_ms        int  what is older may go; 0: nothing for its age
-- ARGV[3] trim_unread      int  1: also what a group has not read or acknowledged
-- ARGV[4] limit            int  entries, at most
-- Returns how many were dropped
local stream = KEYS[1]
local retain_messages, oldest_ms, trim_unread, limit = tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])

-- Entry ids compare as two numbers.
local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

local function earlier(one, other)
  local ms, seq = parts(one)
  local other_ms, other_seq = parts(other)
  if ms ~= other_ms then
    return ms < other_ms and one or other
  end
  return seq < other_seq and one or other
end

local length = redis.call('XLEN', stream)
if length == 0 then
  return 0
end
local over = retain_messages > 0 and math.max(0, length - retain_messages) or 0
local up_to = oldest_ms ~= '0' and oldest_ms .. '-0' or nil -- the first that stays
if over > 0 then
  local found = redis.call('XRANGE', stream, '-', '+', 'COUNT', math.min(over, limit) + 1)
  local first_left = found[#found][1]
  up_to = up_to and (earlier(up_to, first_left) == up_to and first_left or up_to) or first_left
end
if not up_to then
  return 0
end
if not trim_unread then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local of = {}
    for index = 1, #group, 2 do
      of[group[index]] = group[index + 1]
    end
    local pending = redis.call('XPENDING', stream, of.name)
    -- The entry that was delivered last stays: that costs one entry, and its successor's id is not known. A replay sets it back
    -- while later ones may be pending.
    up_to = earlier(up_to, of['last-delivered-id'])
    up_to = pending[1] > 0 and earlier(up_to, pending[2]) or up_to
  end
end
return redis.call('XTRIM', stream, 'MINID', '~', up_to, 'LIMIT', limit)
