local moved, has_ids, last_topic, last_group, last_arrival = {}, false -- moved as in the reply
local ARRIVAL_LENGTH = 7 -- of an id: when its message came in
local delivered, dead = 0, 0

local function id_of(member, body)
  return body.id or string.sub(member, 1, MESSAGE_ID_LENGTH)
end

-- Add an entry to a stream: the message leaves the schedule for good.
local function write_entry(step)
  local member, body = step.member, step.body
  local attempt = body.attempt or (is_tried and text(tries_before(member) + 1)) or '1'
  local more = body.headers and next(body.headers) and {'headers', cjson.encode(body.headers)} or NOTHING
  if step.kind == 'dead' then
    more = {'reason', step.reason, 'group', body.group or '', 'died_ms', text(now_ms), unpack(more)}
  end
  redis.call(
    'XADD', step.key, '*', 'id', id_of(member, body), 'message', body.message, 'topic', body.topic, 'due_ms', step.due_ms,
    'attempt', attempt, unpack(more)
  )
  if is_tried then
    redis.call('HDEL', attempts, string.sub(member, 1, MESSAGE_ID_LENGTH))
  end
  if body.id and not body.group then
    leave_places(places, ids, body.id, string.sub(member, 1, MESSAGE_ID_LENGTH), text(now_ms + id_retention_ms))
    has_ids = true
  end
end

-- Write a message to where it goes; it is taken from its bucket later.
local function move(step)
  if step.kind == 'held' then
    redis.call('ZADD', step.key, step.score, step.member)
    if step.body.id and not step.body.group then
      note_place(places, step.body.id, step.member, step.score, step.name)
    end
  else
    local body = step.body
    if body then
      write_entry(step)
    else
      redis.call('XADD', step.key, '*', step.due_ms, step.member)
      body = {topic = likely_topic(step.member) or 'default'}
    end
    if step.kind == 'dead' then
      dead = dead + 1
      redis.call('SADD', dead_topics, step.name)
    else
      delivered = delivered + 1
      local topic, group, arrival = body.topic, body.group or '', string.sub(step.member, 1, ARRIVAL_LENGTH)
      if topic == last_topic and group == last_group and arrival == last_arrival then
        moved[delivered] = step.due_ms
      else
        moved[delivered] = step.due_ms .. ':' .. topic .. ':' .. group .. ':' .. arrival
        last_topic, last_group, last_arrival = topic, group, arrival
      end
    end
  end
end
