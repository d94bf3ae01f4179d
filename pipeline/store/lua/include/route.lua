local function settings_at(field)
  local value = redis.call('HGET', topic_settings, field)
  local is_json, settings = pcall(cjson.decode, value or '{}')
  if not is_json or type(settings) ~= 'table' then
    error('the topic_settings of ' .. field .. ' are not a JSON object')
  end
  return settings
end

-- The settings of all topics, and those of each topic that was met; what neither says is as pipeline/config.py has it.
local settings_count = redis.call('HLEN', topic_settings)
local of_all = settings_count > 0 and settings_at('*') or {}
local has_own_settings = settings_count > (next(of_all) and 1 or 0)
local of_topic = {}

local KINDS = {stream = 'stream', kafka = 'outbox'} -- of target, by sink; the screen has none

local function settings_of(topic)
  topic = has_own_settings and topic or '*'
  local settings = of_topic[topic]
  if not settings then
    local own = has_own_settings and settings_at(topic) or {}
    local max_rate = tonumber(own.max_rate or of_all.max_rate) or 0
    local has_webhook = (own.webhook or of_all.webhook or '') ~= '' -- its messages are posted from its stream, whatever the sink
    settings = {
      kind = has_webhook and 'stream' or KINDS[own.sink or of_all.sink],
      expire_ms = 1000 * (tonumber(own.expire_after_sec or of_all.expire_after_sec) or 0),
      interval_ms = max_rate > 0 and 1000 * shards / max_rate or 0,
    }
    of_topic[topic] = settings
  end
  return settings
end

-- Whether a message that is not rescheduled goes to the screen, whatever its topic, so that nobody needs to look for that.
local all = settings_of('*')
local is_plain = not (has_own_settings or has_pauses or has_held or all.kind or all.expire_ms > 0 or all.interval_ms > 0)

-- One outbox has the messages of all topics, so that they leave it in their order.
local function name_of(kind, topic)
  return kind == 'outbox' and 'kafka' or topic
end

local usual_targets = {} -- by topic

-- Return where the messages of a topic go, if nothing but their topic decides it.
local function usual_target(topic)
  if usual_targets[topic] == nil then
    local settings = settings_of(topic)
    local is_usual = settings.kind and not has_pauses and not waits(topic) and settings.expire_ms == 0 and settings.interval_ms == 0
    usual_targets[topic] = is_usual and target(settings.kind, name_of(settings.kind, topic)) or false
  end
  return usual_targets[topic]
end

-- Where all goes into the outbox, and nothing has to be looked up for a message, it is written there as it stands and read by who
-- forwards it: to read each here and to write its fields took the server twice as long.
local is_outbox_of_all = not (has_own_settings or has_held or is_tried) and usual_target('default') == target('outbox', 'kafka')

local function goes_as_it_stands(member)
  local form = string.byte(member, FORM_AT)
  return is_outbox_of_all and (form == PLAIN or form == JSON and not string.find(member, '"id"', FORM_AT, true))
end

-- Decide where a message goes; nothing is written. A message for the screen has no kind and no key, one that goes as it stands no body.
-- `go_ms` is when the next message of each topic may go, and is moved on. Of a message that is held, `held_topic` is whose it is: it needs
-- no key to be given, and stays if it has to be held.
local function route(member, due_ms, go_ms, held_topic)
  if goes_as_it_stands(member) then
    return {member = member, due_ms = due_ms, kind = 'outbox', key = usual_target('default')}
  end
  local body = read_member(member)
  local topic = held_topic or body.topic
  local settings, usual = settings_of(topic), usual_target(topic)
  if usual and not body.group then
    return {member = member, body = body, due_ms = body.due_ms or due_ms, kind = settings.kind, key = usual}
  end
  local step = {member = member, body = body, score = due_ms, due_ms = body.due_ms or due_ms, kind = false, name = false, key = false}
  local name = body.group and topic .. ':' .. body.group
  local retry = name and target('retry', name)
  local is_limited = false
  if is_paused(topic) then
    step.kind, step.name = 'held', topic
  elseif name and not (held_topic or is_given[retry]) then
    step.kind, step.name = 'retry', name -- whether the group is there can be seen only when its key is given
  elseif retry and redis.call('EXISTS', retry) == 0 then
    step.kind, step.name, step.reason = 'dead', topic, 'dropped' -- the group is gone: nobody would ever read it
  elseif settings.expire_ms > 0 and now_ms - tonumber(step.due_ms) > settings.expire_ms then
    step.kind, step.name, step.reason = 'dead', topic, 'expired'
  elseif not body.due_ms then
    is_limited = settings.interval_ms > 0
    if (not held_topic and waits(topic)) or (is_limited and next_go_ms(topic, settings.interval_ms, go_ms) > now_ms) then
      step.kind, step.name, is_limited = 'held', topic, false
    end
  end
  if not step.kind and name then
    step.kind, step.name = 'retry', name
  elseif not step.kind and settings.kind then
    step.kind, step.name = settings.kind, name_of(settings.kind, topic)
  end
  step.key = step.kind and target(step.kind, step.name)
  if is_limited and (held_topic or is_given[step.key] or not step.kind) then
    go_ms[topic] = go_ms[topic] + settings.interval_ms
  end
  return step
end
