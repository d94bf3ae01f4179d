-- A rate limit is a token bucket: what it allows in so long may go at once, after a time in which nothing waited; and while messages wait,
-- what nobody took in so long, be it that the topic was paused, that no loop ran, or that all were busy. One message at least.
local BURST_MS, BACKLOG_MS = 100, 1000

local has_pauses = redis.call('EXISTS', pauses) == 1
local first_held = redis.call('ZRANGE', held_topics, 0, 0, 'WITHSCORES')
local has_held = #first_held > 0

-- Whether messages of a topic wait for their turn, which no other may take.
local is_held = {}

local function waits(topic)
  if has_held and is_held[topic] == nil then
    is_held[topic] = redis.call('ZSCORE', held_topics, topic) ~= false
  end
  return is_held[topic]
end

local function is_paused(topic)
  return has_pauses and redis.call('HEXISTS', pauses, topic) == 1
end

-- Return when the next message of a topic may go: each that goes moves it on by an interval, so how far it is in the past is what is in
-- the token bucket. It is never further than an interval ahead, or a limit that was raised would count later. `go_ms` has those that
-- were asked for before.
local function next_go_ms(topic, interval_ms, go_ms)
  if not go_ms[topic] then
    local reserve_ms = waits(topic) and math.max(BURST_MS, BACKLOG_MS - interval_ms) or BURST_MS
    local noted_ms = tonumber(redis.call('HGET', rate_limits, topic) or '0')
    go_ms[topic] = math.min(math.max(noted_ms, now_ms - reserve_ms), now_ms + interval_ms)
  end
  return go_ms[topic]
end
