#!lua
-- Begin a transaction that stores messages with an idempotency key: look whether one of the keys is known. If so, or if what is written to
-- is not ours, nothing that follows in the same MULTI may happen: see include/aside.lua; schedule.lua is at the end. So the messages can
-- go in by plain commands: through a script, all of it took the server twice as long.
--
-- KEYS[1] ids       ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[2] cancelled ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[3] places    HASH  idempotency key -> place of a message that is scheduled or in flight
-- KEYS[4..] bucket  ZSET  each that is written; then aside, for places and for each bucket: where it is meanwhile
-- ARGV[1] now_ms    int   "" means the server's clock; tests pass their own
-- ARGV[2..] idempotency keys, each once
-- Returns the numbers, from 0, of those that are known
--
-- include common
-- include aside
local ids, cancelled, places, now_ms = KEYS[1], KEYS[2], KEYS[3], clock_ms(ARGV[1])
local FIRST_WRITTEN, written = 3, (#KEYS - 2) / 2
local FIRST_NAME, PAGE = 2, 1000 -- keys a command: Lua hands over 8,000 values at most

-- Return what a key has for some names; false for what is not there. A key that is not there is not asked.
local function lookup(command, key, first, last)
  return redis.call('EXISTS', key) == 1 and redis.call(command, key, unpack(ARGV, first, last)) or {}
end

local function is_remembered(forget_ms)
  return now_ms < tonumber(forget_ms)
end

local function find_known()
  local known = {}
  for bucket = FIRST_WRITTEN + 1, FIRST_WRITTEN + written - 1 do
    redis.call('ZCARD', KEYS[bucket])
  end
  for first = FIRST_NAME, #ARGV, PAGE do
    local last = math.min(first + PAGE - 1, #ARGV)
    local waiting = lookup('HMGET', places, first, last)
    local delivered, gone = lookup('ZMSCORE', ids, first, last), lookup('ZMSCORE', cancelled, first, last)
    for cursor = first, last do
      local index = cursor - first + 1
      local delivered_until, gone_until = delivered[index], gone[index]
      if waiting[index] or delivered_until and is_remembered(delivered_until) or gone_until and is_remembered(gone_until) then
        known[#known + 1] = cursor - FIRST_NAME
      end
    end
  end
  return known
end

local is_right, known = pcall(find_known)
if is_right and #known == 0 then
  let_be(KEYS, FIRST_WRITTEN, written)
  return known
end
set_aside(KEYS, FIRST_WRITTEN, written)
return is_right and known or error(known)
