#!lua flags=allow-oom
-- Forget a topic of which nothing is left: no entry or group of its stream, no dead letter, no held message. With topics that users
-- name, what is kept of each would grow without bound. A group that XGROUP DESTROY took away has left its field in groups, the stream of
-- its retries, and who is active: these keys are built here, of the same shard.
--
-- KEYS[1] topics       SET     topics that have a stream, dead letters or held messages
-- KEYS[2] stream       STREAM
-- KEYS[3] dead         STREAM
-- KEYS[4] held         ZSET    member -> due_ms
-- KEYS[5] rate_limits  HASH    topic -> epoch ms at which its next message may go, of topics with a max_rate
-- KEYS[6] groups       HASH    group -> ordered or shared, of the topic
-- KEYS[7] dead_topics  SET     topics that have dead letters
-- ARGV[1] topic   string
-- ARGV[2] now_ms  int     "" means the server's clock; tests pass their own
-- Returns 1 if it is forgotten, 0 if something is left
--
-- include common
-- include dead
local topics, stream, dead, held, rate_limits, groups = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local dead_topics, topic, now_ms = KEYS[7], ARGV[1], clock_ms(ARGV[2])
local shard = string.sub(topics, 1, -#'topics' - 1) -- what all keys of the shard begin with
local FULL_MS = 1000 -- after so long a token bucket of which nothing was taken is as if it were new

local go_ms = redis.call('HGET', rate_limits, topic)
if go_ms and tonumber(go_ms) <= now_ms - FULL_MS and redis.call('EXISTS', held) == 0 then
  redis.call('HDEL', rate_limits, topic)
end
forget_if_none_dead(dead, dead_topics, topic)
local has_groups = redis.call('EXISTS', stream) == 1 and #redis.call('XINFO', 'GROUPS', stream) > 0
local is_empty = redis.call('XLEN', stream) == 0 and redis.call('XLEN', dead) == 0 and redis.call('EXISTS', held) == 0
if has_groups or not is_empty then
  return 0
end
for _, group in ipairs(redis.call('HKEYS', groups)) do
  local name = topic .. ':' .. group
  redis.call('UNLINK', shard .. 'retry:' .. name, shard .. 'active:' .. name)
end
redis.call('UNLINK', stream, dead, groups)
redis.call('SREM', topics, topic)
return 1
