#!lua flags=allow-oom
-- Drop the oldest entries of a stream: those beyond its length or age that every group has read and acknowledged. So many at a time,
-- and mostly without reading them, as the server does nothing else meanwhile. Of what is beyond the length whole nodes only, so that the stream
-- may keep some more; what is too old goes to the last entry.
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

-- The first entry that some group still needs. The one that was delivered last stays: that costs one entry, and its successor's id is
-- not known. A replay sets it back while later ones may be pending.
local function first_needed()
  local needed = '18446744073709551615-18446744073709551615'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local of = {}
    for index = 1, #group, 2 do
      of[group[index]] = group[index + 1]
    end
    needed = earlier(needed, of['last-delivered-id'])
    local pending = redis.call('XPENDING', stream, of.name)
    if pending[1] > 0 then
      needed = earlier(needed, pending[2])
    end
  end
  return needed
end

local length = redis.call('XLEN', stream)
if length == 0 then
  return 0
end
local needed = '18446744073709551615-18446744073709551615'
if not trim_unread then
  needed = first_needed()
end

-- Drop so many of the oldest entries before an id, at most: whole nodes, and if there are none, with `to_the_last` single entries. Those are
-- a part of one node, but where the server has nodes of more entries than may go at once.
local function drop(up_to, count, to_the_last)
  local dropped = redis.call('XTRIM', stream, 'MINID', '~', up_to, 'LIMIT', count)
  if dropped > 0 or not to_the_last then
    return dropped
  end
  local first = redis.call('XRANGE', stream, '-', '(' .. up_to, 'COUNT', count)
  return #first > 0 and redis.call('XTRIM', stream, 'MINID', #first < count and up_to or first[count][1]) or 0
end

local over = retain_messages > 0 and length - retain_messages or 0
local dropped = over > 0 and drop(needed, math.min(over, limit), over > limit) or 0
if dropped == 0 and oldest_ms ~= '0' then
  dropped = drop(earlier(needed, oldest_ms .. '-0'), limit, true)
end
return dropped
