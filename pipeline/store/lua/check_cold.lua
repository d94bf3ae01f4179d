#!lua
-- Begin a transaction that brings cold messages with an idempotency key into Redis: look whether the place of each is still the one that
-- it has in its cold file. Otherwise it was cancelled, replaced or rescheduled, or another message had the key before it. If that is so of
-- one, or what is written to is not ours, nothing that follows in the same MULTI may happen: see include/aside.lua.
--
-- KEYS[1] cold      HASH  hour since the epoch -> how many messages that are due in it wait in cold files
-- KEYS[2] places    HASH  idempotency key -> place, see include/places.lua
-- KEYS[3..] bucket  ZSET  each that is written; then aside, for places and for each bucket: where it is meanwhile
-- ARGV[1] expected  the places in cold files of all messages, of 17 bytes each, in a row
-- ARGV[2..] idempotency keys, which may come again with another place
-- Returns the numbers, from 0, of those that are not to come
--
-- include aside
local cold, places, expected = KEYS[1], KEYS[2], ARGV[1]
local FIRST_WRITTEN, written = 2, (#KEYS - 1) / 2
local COLD_PLACE_LENGTH = 17 -- as in core/cold.py
local FIRST_NAME, PAGE = 2, 1000 -- keys a command: Lua hands over 8,000 values at most

local function find_changed()
  local changed = {}
  redis.call('HGET', cold, '0')
  for bucket = FIRST_WRITTEN + 1, FIRST_WRITTEN + written - 1 do
    redis.call('ZCARD', KEYS[bucket])
  end
  for first = FIRST_NAME, #ARGV, PAGE do
    local last = math.min(first + PAGE - 1, #ARGV)
    local found = redis.call('HMGET', places, unpack(ARGV, first, last))
    for cursor = first, last do
      local number = cursor - FIRST_NAME
      local place = string.sub(expected, number * COLD_PLACE_LENGTH + 1, (number + 1) * COLD_PLACE_LENGTH)
      if found[cursor - first + 1] ~= place then
        changed[#changed + 1] = number
      end
    end
  end
  return changed
end

local is_right, changed = pcall(find_changed)
if is_right and #changed == 0 then
  let_be(KEYS, FIRST_WRITTEN, written)
  return changed
end
set_aside(KEYS, FIRST_WRITTEN, written)
return is_right and changed or error(changed)
