-- What is due and can't go is held: it waits in held:<topic>, in order. Of topics that are not paused held_topics says when the next of
-- these may go. Each claim takes first what may go now, of half the messages at most, so that a long queue keeps no other topic waiting;
-- a claim of one message takes what has waited longer. As long as something is held of a topic, what comes due goes behind it.
local TOPICS_MAX = 100 -- of which something is held that a call looks at
local LOOK_MS = 10 -- between two looks at what is held of a topic, at least, so that a high rate goes in small bursts

local touched = {} -- topics of which something was held, or is from now on
local turns, turn_count = {}, 0 -- of topics of which something is held: what may go now, in order
local turns_max, turn_bytes_max = math.ceil(claim_limit / 2), claim_bytes_max / 2

-- Take what may go now of what is held of a topic.
local function take_turn(topic)
  local turn, held, interval_ms = {topic = topic, key = target('held', topic), steps = {}}, 0, settings_of(topic).interval_ms
  turns[#turns + 1], touched[topic] = turn, true
  while turn_count < turns_max and bytes < turn_bytes_max do
    local limit = math.min(PAGE, turns_max - turn_count)
    if interval_ms > 0 then
      limit = math.min(limit, math.max(1, 1 + math.floor((now_ms - next_go_ms(topic, interval_ms, go_ms)) / interval_ms)))
    end
    local page = due_page(turn.key, held, limit, 'WITHSCORES')
    for index = 1, #page, 2 do
      local step = bytes < turn_bytes_max and route(page[index], due_text(page[index + 1]), go_ms, topic)
      if not step or step.kind == 'held' then
        return
      end
      if step.kind then
        plan[#plan + 1] = step
      else
        add_row(step.member, step.score)
      end
      turn.steps[#turn.steps + 1] = step
      held, turn_count, bytes = held + 1, turn_count + 1, bytes + #step.member
    end
    if #page < 2 * limit then
      is_held[topic] = false -- all of it goes, and what has come due may go with it
      return
    end
  end
end

-- Whether the bucket has only messages that are not due, and not of this bucket.
local function is_misfiled()
  local head_ms = oldest and tonumber(redis.call('ZRANGE', bucket, 0, 0, 'WITHSCORES')[2])
  return head_ms and head_ms > now_ms and head_ms >= tonumber(bucket_start_ms) + BUCKET_WIDTH_MS
end

-- Whether a claim of one message takes it from the bucket: it was due there before anything that is held could go.
local function is_for_bucket()
  local head_ms = claim_limit == 1 and oldest and redis.call('ZRANGE', bucket, 0, 0, 'WITHSCORES')[2]
  return head_ms and tonumber(head_ms) <= tonumber(first_held[2])
end

-- What keeps other buckets waiting is seen to first.
if has_held and tonumber(first_held[2]) <= now_ms and not is_for_bucket() and not is_misfiled() then
  for _, topic in ipairs(redis.call('ZRANGE', held_topics, '-inf', text(now_ms), 'BYSCORE', 'LIMIT', 0, TOPICS_MAX)) do
    if turn_count < turns_max and bytes < turn_bytes_max then
      take_turn(topic)
    end
  end
end

-- Note what is left in the token buckets, and when something that is held may go next.
local function note_turns()
  for topic in pairs(touched) do
    local interval_ms = settings_of(topic).interval_ms
    local next_ms = interval_ms > 0 and math.ceil(next_go_ms(topic, interval_ms, go_ms)) or now_ms
    next_ms = next_ms > now_ms and math.max(next_ms, now_ms + LOOK_MS) or now_ms
    local due_ms = redis.call('ZRANGE', target('held', topic), 0, 0, 'WITHSCORES')[2] -- to come, if the clock was set back
    if is_paused(topic) or not due_ms then
      redis.call('ZREM', held_topics, topic)
    else
      redis.call('ZADD', held_topics, text(math.max(next_ms, tonumber(due_ms))), topic)
    end
  end
  for topic, ms in pairs(go_ms) do
    redis.call('HSET', rate_limits, topic, string.format('%.3f', ms))
  end
end

-- Take out of what is held all that has gone. What is given back goes to its bucket, so its id leads there.
local function end_turns()
  for _, turn in ipairs(turns) do
    for _, step in ipairs(turn.steps) do
      redis.call('ZREM', turn.key, step.member)
      if not step.kind and step.body.id then
        note_place(places, step.body.id, step.member, step.score)
      end
    end
  end
  note_turns()
end
