#!lua flags=allow-oom
-- Go on with an outbox: keep the lease, and drop what is in Kafka.
--
-- KEYS[1] outbox     STREAM  the messages for Kafka, in order
-- KEYS[2] forwarder  STRING  the lease of who writes them to Kafka; it expires
-- ARGV[1] token      string  of the lease
-- ARGV[2] lease_ms   int
-- ARGV[3] position   string  id of the last entry that is in Kafka; "" if that is not known
-- Returns nil if the lease is over, else how many entries got new ids as the server was found set back
local outbox, forwarder = KEYS[1], KEYS[2]
local token, lease_ms, position = ARGV[1], ARGV[2], ARGV[3]

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
  return #entries
end

local moved = 0
if position ~= '' and is_set_back() then
  moved = move_beyond_position()
end
if position ~= '' then
  redis.call('XTRIM', outbox, 'MINID', position)
  redis.call('XDEL', outbox, position)
end
return moved
