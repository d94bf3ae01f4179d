#!lua flags=allow-oom
-- Give a consumer messages of its group that are pending: its own, after a reply was lost, or those of others that are silent.
-- This does not count as a delivery; of an ordered group only the active consumer gets any.
--
-- KEYS[1] stream  STREAM
-- KEYS[2] active  STRING  the active consumer of an ordered group
-- KEYS[3] groups  HASH    group -> ordered or shared, of the topic
-- ARGV[1] group        string
-- ARGV[2] consumer     string
-- ARGV[3] min_idle_ms  int     take over what was silent for so long; "" means the consumer's own
-- ARGV[4] cursor       string  where to begin: an entry id
-- ARGV[5] limit        int     messages, at most; ten times as many are looked at
-- Returns {cursor to go on from, or "0-0" at the end, {entry id, how often delivered, {field, value, …}}, …}
local stream, active, groups = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, min_idle_ms, cursor, limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if redis.call('HGET', groups, group) == 'ordered' and redis.call('GET', active) ~= consumer then
  return {'0-0', {}}
end
local taken, next_cursor = {}, '0-0'
if min_idle_ms == '' then
  local own = redis.call('XPENDING', stream, group, cursor, '+', limit, consumer)
  for _, pending in ipairs(own) do
    taken[#taken + 1] = pending[1]
  end
  if #own == tonumber(limit) then
    next_cursor = '(' .. own[#own][1]
  end
else
  local found = redis.call('XAUTOCLAIM', stream, group, consumer, min_idle_ms, cursor, 'COUNT', limit, 'JUSTID')
  next_cursor, taken = found[1], found[2]
end
local rows = {}
for _, id in ipairs(taken) do
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if entry then
    local pending = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
    rows[#rows + 1] = {id, pending[4], entry[2]}
  else
    redis.call('XACK', stream, group, id) -- its entry was trimmed: there is nothing to deliver
  end
end
return {next_cursor, rows}
