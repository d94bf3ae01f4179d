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
local RUN_MAX = 1000 -- messages a call: unpack has a limit
-- By verb, the idle time that a message has from then on, and what becomes of how often it was delivered.
local CLAIMS = {extend = {0, 0}, start = {0, 1}, release = {AT_ONCE_MS, 0}, undo = {AT_ONCE_MS, -1}}

if verb ~= 'ack' and not CLAIMS[verb] then
  return redis.error_reply('ERR settle knows no ' .. verb)
end
local is_active = redis.call('HGET', groups, group) ~= 'ordered' or redis.call('GET', active) == consumer
local delivered = {} -- what of this is the consumer's: a message -> how often it was delivered
if is_active and #ARGV > FIRST then
  -- Mostly they are one after the other. A look at all of them costs a third of one at each.
  local count = (#ARGV - FIRST + 1) / 2
  for _, pending in ipairs(redis.call('XPENDING', stream, group, ARGV[FIRST], ARGV[#ARGV - 1], count, consumer)) do
    delivered[pending[1]] = pending[4]
  end
end

local run, run_delivered = {}, nil -- messages of which the same is to be said
local function settle_run()
  if #run == 0 then
    return
  elseif verb == 'ack' then
    redis.call('XACK', stream, group, unpack(run))
  else
    local words = {'XCLAIM', stream, group, consumer, 0, unpack(run)}
    for _, word in ipairs({'IDLE', CLAIMS[verb][1], 'RETRYCOUNT', run_delivered + CLAIMS[verb][2], 'JUSTID'}) do
      words[#words + 1] = word
    end
    redis.call(unpack(words))
  end
  run = {}
end

local done = {}
for index = FIRST, #ARGV, 2 do
  local id, delivery_count = ARGV[index], tonumber(ARGV[index + 1])
  if is_active and not delivered[id] then -- it is no more, or it is not between the first and the last
    local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
    delivered[id] = pending and pending[4]
  end
  local is_own = is_active and delivered[id] == delivery_count
  if is_own then
    if delivery_count ~= run_delivered or #run == RUN_MAX then
      settle_run()
    end
    run[#run + 1], run_delivered = id, delivery_count
  elseif verb == 'ack' then
    redis.call('HINCRBY', counters, 'late_acks', 1)
  end
  done[#done + 1] = is_own and 1 or 0
end
settle_run()
return done
