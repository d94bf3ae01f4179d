#!lua flags=allow-oom
-- Go on with an outbox: keep the lease, drop what is in Kafka, and read what comes next.
--
-- KEYS[1] outbox     STREAM  the messages for Kafka, in order
-- KEYS[2] forwarder  STRING  the lease of who writes them to Kafka; it expires
-- ARGV[1] token      string  of the lease
-- ARGV[2] lease_ms   int
-- ARGV[3] position   string  id of the last entry that is in Kafka; "" if that is not known
-- ARGV[4] after      string  entry behind which to read; "" for the first one
-- ARGV[5] limit      int     entries, at most; 0: only keep the lease
-- ARGV[6] bytes_max  int     bytes of messages after which the reply is full
-- Returns nil if the lease is over, else whether the server was found set back, and {id, {field, value, …}} for each entry
local outbox, forwarder = KEYS[1], KEYS[2]
local token, lease_ms, position, after = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local limit, bytes_max = tonumber(ARGV[5]), tonumber(ARGV[6])
local PAGE = 100 -- entries a step, so that bytes_max is passed by one page at most

if redis.call('GET', forwarder) ~= token then
  return false
end
redis.call('SET', forwarder, token, 'PX', lease_ms)

local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return ms, tonumber(seq)
end

-- Whether the last id that was given is before the position: the server has lost its last writes.
local function is_set_back()
  local info = redis.call('EXISTS', outbox) == 1 and redis.call('XINFO', 'STREAM', outbox) or {}
  for index = 1, #info, 2 do
    if info[index] == 'last-generated-id' then
      local ms, seq = parts(info[index + 1])
      local position_ms, position_seq = parts(position)
      return tonumber(ms) < tonumber(position_ms) or (ms == position_ms and seq < position_seq)
    end
  end
  return false
end

-- Give all entries, and what comes next, ids beyond the position. Most of them are in Kafka, and come twice; which, nobody knows.
local function move_beyond_position()
  local ms, seq = parts(position)
  local function id_after(steps)
    return ms .. '-' .. string.format('%.0f', seq + steps)
  end
  local entries = redis.call('XRANGE', outbox, '-', '+')
  for index, entry in ipairs(entries) do
    redis.call('XADD', outbox, id_after(index), unpack(entry[2]))
  end
  if #entries == 0 then
    redis.call('XADD', outbox, id_after(1), 'id', '')
    redis.call('XDEL', outbox, id_after(1))
  end
end

local was_set_back = position ~= '' and is_set_back()
if was_set_back then
  move_beyond_position()
end
if position ~= '' then
  redis.call('XTRIM', outbox, 'MINID', position)
  redis.call('XDEL', outbox, position)
end
local found, bytes, start = {}, 0, after == '' and '-' or '(' .. after
while #found < limit and bytes < bytes_max do
  local page = redis.call('XRANGE', outbox, start, '+', 'COUNT', math.min(PAGE, limit - #found))
  if #page == 0 then
    break
  end
  for _, entry in ipairs(page) do
    found[#found + 1] = entry
    for _, value in ipairs(entry[2]) do
      bytes = bytes + #value
    end
  end
  start = '(' .. page[#page][1]
end
return {was_set_back and 1 or 0, found}
