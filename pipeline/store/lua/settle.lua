#!lua flags=allow-oom
-- Settle pending messages of a consumer: refused for those that it no longer owns, and in an ordered group unless it is active. A
-- message that another consumer took over, or that was redelivered under the same name, is pending under another name or count.
--
-- KEYS[1] stream    STREAM
-- KEYS[2] active    STRING  the active consumer of an ordered group
-- KEYS[3] groups    HASH    group -> ordered or shared, of the topic
-- KEYS[4] counters  HASH
-- ARGV[1] verb      string  ack: it is handled; extend: more time; start: delivered once more; release: anybody may have it at
--                           once; undo: the same, and it counts as not delivered
-- ARGV[2] group     string
-- ARGV[3] consumer  string
-- ARGV[4..] entry id, how often it was delivered
-- Returns 1 for each message for which it was done, 0 for each that is not the consumer's (any more)
local stream, active, groups, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local verb, group, consumer = ARGV[1], ARGV[2], ARGV[3]
local FIRST = 4
local AT_ONCE_MS = '1000000000000' -- an idle time beyond every lease

local is_active = redis.call('HGET', groups, group) ~= 'ordered' or redis.call('GET', active) == consumer
local done = {}
for index = FIRST, #ARGV, 2 do
  local id, delivery_count = ARGV[index], tonumber(ARGV[index + 1])
  local pending = is_active and redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
  local is_own = pending and pending[4] == delivery_count
  if is_own then
    if verb == 'ack' then
      redis.call('XACK', stream, group, id)
    elseif verb == 'extend' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', delivery_count, 'JUSTID')
    elseif verb == 'start' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', delivery_count + 1, 'JUSTID')
    elseif verb == 'release' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', AT_ONCE_MS, 'RETRYCOUNT', delivery_count, 'JUSTID')
    elseif verb == 'undo' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', AT_ONCE_MS, 'RETRYCOUNT', delivery_count - 1, 'JUSTID')
    else
      return redis.error_reply('ERR settle knows no ' .. verb)
    end
  elseif verb == 'ack' then
    redis.call('HINCRBY', counters, 'late_acks', 1)
  end
  done[#done + 1] = is_own and 1 or 0
end
return done
