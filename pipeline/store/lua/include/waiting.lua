-- Lua compares strings by the server's locale, Redis those of equal score by their bytes.
local function is_before(one, other)
  for at = 1, math.min(#one, #other) do
    local byte, other_byte = string.byte(one, at), string.byte(other, at)
    if byte ~= other_byte then
      return byte < other_byte
    end
  end
  return #one < #other
end

-- Return the parts of a place: the message id, the score, and the topic if it is held, else "".
local function read_place(place)
  local score, held_topic = string.match(string.sub(place, MESSAGE_ID_LENGTH + 1), '^(%d+)r?:?(.*)$')
  return string.sub(place, 1, MESSAGE_ID_LENGTH), score, held_topic
end

-- Return the member with this id and score. A campaign has a million messages at one millisecond, so it is searched by halves.
local function find(set, message_id, score)
  local low = redis.call('ZCOUNT', set, '-inf', '(' .. score)
  local stop = low + redis.call('ZCOUNT', set, score, score)
  local high = stop
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_before(redis.call('ZRANGE', set, middle, middle)[1], message_id) then
      low = middle + 1
    else
      high = middle
    end
  end
  local member = low < stop and redis.call('ZRANGE', set, low, low)[1]
  return member and string.sub(member, 1, MESSAGE_ID_LENGTH) == message_id and member
end

-- Take a member out of its bucket, or out of what is held.
local function remove(set, member, score, held_topic, buckets)
  redis.call('ZREM', set, member)
  if held_topic == '' and redis.call('EXISTS', set) == 0 then
    redis.call('ZREM', buckets, bucket_start(tonumber(score)))
  end
end

-- Wake the loops if a member that has just been stored is due before everything else: they sleep until the time they know.
local function ring_if_first(buckets, start, bucket, member, due_ms, wake_channel)
  local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
  if oldest == start and redis.call('ZRANGE', bucket, 0, 0)[1] == member then
    redis.call('PUBLISH', wake_channel, due_ms)
  end
end
