#!lua flags=allow-oom
-- Say what becomes of messages that a consumer has: only while they are its own. A message that another consumer took over, or that
-- was handed out again under the same name, is pending under another name or count, and nothing is done about it.
--
-- KEYS[1] stream    STREAM
-- KEYS[2] active    STRING  the consumer that has the turn in an ordered group
-- KEYS[3] counters  HASH
-- ARGV[1] verb      string  ack: it is handled; extend: more time; begin: handed out once more; drop: anybody may have it at once;
--                           release: and it counts as not handed out
-- ARGV[2] group     string
-- ARGV[3] consumer  string
-- ARGV[4] ordered   int     1: the consumer must have the turn, too
-- ARGV[5..] entry id, how often it was handed out
-- Returns 1 for each message for which it was done, 0 for each that is not the consumer's (any more)
local stream, active, counters = KEYS[1], KEYS[2], KEYS[3]
local verb, group, consumer, ordered = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local FIRST = 5
local AT_ONCE_MS = '1000000000000' -- an idle time beyond every lease

local has_turn = not ordered or redis.call('GET', active) == consumer
local done = {}
for index = FIRST, #ARGV, 2 do
  local id, handed_out = ARGV[index], tonumber(ARGV[index + 1])
  local pending = has_turn and redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
  local is_own = pending and pending[4] == handed_out
  if is_own then
    if verb == 'ack' then
      redis.call('XACK', stream, group, id)
    elseif verb == 'extend' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', handed_out, 'JUSTID')
    elseif verb == 'begin' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', 0, 'RETRYCOUNT', handed_out + 1, 'JUSTID')
    elseif verb == 'drop' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', AT_ONCE_MS, 'RETRYCOUNT', handed_out, 'JUSTID')
    elseif verb == 'release' then
      redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', AT_ONCE_MS, 'RETRYCOUNT', handed_out - 1, 'JUSTID')
    else
      return redis.error_reply('ERR settle knows no ' .. verb)
    end
  elseif verb == 'ack' then
    redis.call('HINCRBY', counters, 'stale_acks', 1)
  end
  done[#done + 1] = is_own and 1 or 0
end
return done
