#!lua
-- Finish a transaction that has just added messages to their buckets, and the places of those with an idempotency key: index the buckets
-- and move the markers. It runs inside MULTI, behind WATCH on the markers, so it needs no check of its own that they are where the
-- caller saw them. Without the flag allow-oom a server that is out of memory refuses the transaction as a whole.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] markers   ZSET  part id -> epoch ms at which its marker moved last
-- KEYS[3] counters  HASH
-- KEYS[4] cold      HASH  hour since the epoch -> how many messages that are due in it wait in cold files
-- KEYS[5..] marker  STRING  one for each move; then places HASH, then bucket ZSET  member -> due_ms, one for each bucket
-- then, if check_ids.lua was at the beginning: aside, for places and for each bucket
-- ARGV[1] wake_channel  string
-- ARGV[2] stored        int     messages added by this transaction, cold ones included
-- ARGV[3] duplicates    int     messages that are left out, as their idempotency keys are known
-- ARGV[4] rejected      int     lines that are not accepted
-- ARGV[5] first_member  string  the first of the messages without an idempotency key, "" if there are none
-- ARGV[6] first_identified string  the first of the others
-- ARGV[7] now_ms        int     "" means the server's clock; tests pass their own
-- ARGV[8] moves         int     number of markers
-- ARGV[9] buckets       int     number of buckets
-- then for each move: part id, marker; then for each bucket: bucket_start_ms; then for each hour of cold messages: the hour, how many
-- Returns nothing: a MULTI whose beginning has set something aside has done nothing
--
-- include common
-- include aside
local buckets, markers, counters, cold = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local wake_channel, first_member, first_identified = ARGV[1], ARGV[5], ARGV[6]
local now_ms, move_count, bucket_count = clock_ms(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local FIRST_MARKER, FIRST_MOVE = 5, 10
local places, first_start = FIRST_MARKER + move_count, FIRST_MOVE + 2 * move_count
local first_bucket, written = places + 1, 1 + bucket_count

-- What was not checked, or has found a key that is known, has done nothing.
if KEYS[places + written] and not were_let_be(KEYS, places, written) then
  return {}
end

-- A key that holds something else ends the script here: no marker is moved for what is not stored.
for bucket = 0, bucket_count - 1 do
  redis.call('ZCARD', KEYS[first_bucket + bucket])
end

if ARGV[first_start + bucket_count] then
  redis.call('HGET', cold, '0')
end

for bucket = 0, bucket_count - 1 do
  redis.call('ZADD', buckets, ARGV[first_start + bucket], ARGV[first_start + bucket])
end

for move = 0, move_count - 1 do
  redis.call('SET', KEYS[FIRST_MARKER + move], ARGV[FIRST_MOVE + 2 * move + 1])
  redis.call('ZADD', markers, text(now_ms), ARGV[FIRST_MOVE + 2 * move])
end
for index = first_start + bucket_count, #ARGV, 2 do
  redis.call('HINCRBY', cold, ARGV[index], ARGV[index + 1])
end
for index, name in ipairs({'stored', 'duplicates', 'rejected'}) do
  if ARGV[index + 1] ~= '0' then
    redis.call('HINCRBY', counters, name, ARGV[index + 1])
  end
end

-- A message that is due before everything else wakes the loops, which sleep until the time they know.
local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
for bucket = 0, bucket_count - 1 do
  if ARGV[first_start + bucket] == oldest then
    local head = redis.call('ZRANGE', KEYS[first_bucket + bucket], 0, 0, 'WITHSCORES')
    if head[1] == first_member or head[1] == first_identified then
      redis.call('PUBLISH', wake_channel, text(tonumber(head[2])))
    end
  end
end
return {}
