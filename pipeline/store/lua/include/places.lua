-- Whether an idempotency key is remembered: it may be past its time, and not cleaned up yet.
local function is_remembered(set, id, now_ms)
  local forget_ms = redis.call('ZSCORE', set, id)
  return forget_ms and tonumber(forget_ms) > now_ms
end

-- Forget names whose time is over, some at a time.
local function forget_over(names, now_ms)
  local over = redis.call('ZRANGE', names, '-inf', text(now_ms), 'BYSCORE', 'LIMIT', 0, 1000)
  if #over > 0 then
    redis.call('ZREM', names, unpack(over))
  end
end

-- Where the message of an idempotency key is while it is scheduled or in flight: its message id and its score in the bucket; "r", if it
-- is a replacement; and, if it is held, ":" and the topic. That it is known afterwards is what `ids` says.
-- A transaction writes the first two by a plain command (store/resp.py).
local function place_of(member, score, held_topic, is_replacement)
  local mark, held = is_replacement and 'r' or '', held_topic and ':' .. held_topic or ''
  return string.sub(member, 1, MESSAGE_ID_LENGTH) .. score .. mark .. held
end

-- Whether the message of a place is a replacement: as long as it waits, whatever moves it.
local function is_of_replacement(place)
  return string.find(place, '^%d+r', MESSAGE_ID_LENGTH + 1)
end

-- Note where a message goes, if this is where its id leads to: another program may store the same id without it.
local function note_place(places, id, member, score, held_topic)
  local place = redis.call('HGET', places, id)
  if place and string.sub(place, 1, MESSAGE_ID_LENGTH) == string.sub(member, 1, MESSAGE_ID_LENGTH) then
    redis.call('HSET', places, id, place_of(member, score, held_topic, is_of_replacement(place)))
  end
end

-- Remember the id of a message that has left the schedule, if it was known. An id that leads to another message stays with that one.
local function leave_places(places, ids, id, message_id, forget_ms)
  local place = redis.call('HGET', places, id)
  if not place then
    redis.call('ZADD', ids, 'XX', forget_ms, id)
  elseif string.sub(place, 1, MESSAGE_ID_LENGTH) == message_id then
    redis.call('HDEL', places, id)
    redis.call('ZADD', ids, forget_ms, id)
  end
end
