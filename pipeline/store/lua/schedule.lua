#!lua
-- Finish a transaction that has just added messages to their buckets: index these, store the messages with an id of their caller's,
-- and move the fences. It runs inside MULTI, behind WATCH on the fences, so it needs no check of its own that they are where the
-- caller saw them. Without the flag allow-oom a server that is out of memory refuses the transaction as a whole.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] fences    ZSET  fence token -> epoch ms at which its fence moved last
-- KEYS[3] ids       ZSET  caller's id -> epoch ms at which it is forgotten
-- KEYS[4] counters  HASH
-- KEYS[5..] fence   STRING  one for each move; then bucket ZSET  member -> due_ms, one for each bucket
-- ARGV[1] wake_channel  string
-- ARGV[2] stored        int     messages without an id, added by this transaction
-- ARGV[3] first_due_ms  int     of these, "" if there are none
-- ARGV[4] first_member  string  the first of these
-- ARGV[5] rejected      int     lines that are not accepted
-- ARGV[6] now_ms        int     "" means the server's clock; tests pass their own
-- ARGV[7] moves         int     number of fences
-- ARGV[8] buckets       int     number of buckets
-- then for each move: fence token, fence; then for each bucket: bucket_start_ms
-- then for each message with an id: number of its bucket from 1, due_ms, member, caller_id
-- Returns {stored, known}: known are messages whose caller's id is known
local buckets, fences, ids, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local wake_channel, stored, rejected = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[5])
local first_due_ms, firsts = tonumber(ARGV[3]) or math.huge, {[ARGV[4]] = true}
local now_ms, move_count, bucket_count = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
if now_ms == '' then
  local time = redis.call('TIME')
  now_ms = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
end
local FIRST_FENCE, FIRST_MOVE = 5, 9
local first_bucket, first_start = FIRST_FENCE + move_count, FIRST_MOVE + 2 * move_count

-- A key that holds something else ends the script here: no id is remembered and no fence moved for what is not stored.
for bucket = 0, bucket_count - 1 do
  redis.call('ZCARD', KEYS[first_bucket + bucket])
end

local known, cursor = 0, first_start + bucket_count
while cursor < #ARGV do
  local due_ms, member, caller_id = tonumber(ARGV[cursor + 1]), ARGV[cursor + 2], ARGV[cursor + 3]
  if redis.call('ZADD', ids, 'NX', '+inf', caller_id) == 1 then
    redis.call('ZADD', KEYS[first_bucket + tonumber(ARGV[cursor]) - 1], ARGV[cursor + 1], member)
    if due_ms < first_due_ms then
      first_due_ms, firsts = due_ms, {}
    end
    firsts[member] = due_ms == first_due_ms or nil
    stored = stored + 1
  else
    known = known + 1
  end
  cursor = cursor + 4
end

for bucket = 0, bucket_count - 1 do
  if redis.call('ZCARD', KEYS[first_bucket + bucket]) > 0 then
    redis.call('ZADD', buckets, ARGV[first_start + bucket], ARGV[first_start + bucket])
  end
end

for move = 0, move_count - 1 do
  redis.call('SET', KEYS[FIRST_FENCE + move], ARGV[FIRST_MOVE + 2 * move + 1])
  redis.call('ZADD', fences, now_ms, ARGV[FIRST_MOVE + 2 * move])
end
for name, count in pairs({stored = stored, known = known, rejected = rejected}) do
  if count > 0 then
    redis.call('HINCRBY', counters, name, count)
  end
end

-- A newcomer that is due before everything else wakes the loops, which sleep until the time they know.
local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
for bucket = 0, bucket_count - 1 do
  if ARGV[first_start + bucket] == oldest then
    if firsts[redis.call('ZRANGE', KEYS[first_bucket + bucket], 0, 0)[1]] then
      redis.call('PUBLISH', wake_channel, string.format('%.0f', first_due_ms))
    end
  end
end
return {stored, known}
