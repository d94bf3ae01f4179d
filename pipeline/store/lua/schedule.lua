#!lua
-- Finish a transaction that has just added messages to their buckets: index these, store the messages with an idempotency key, and move
-- the markers. It runs inside MULTI, behind WATCH on the markers, so it needs no check of its own that they are where the
-- caller saw them. Without the flag allow-oom a server that is out of memory refuses the transaction as a whole.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] markers   ZSET  part id -> epoch ms at which its marker moved last
-- KEYS[3] places    HASH  idempotency key -> place of a message that is scheduled or in flight, see include/places.lua
-- KEYS[4] ids       ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[5] cancelled ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[6] counters  HASH
-- KEYS[7..] marker STRING  one for each move; then bucket ZSET  member -> due_ms, one for each bucket
-- ARGV[1] wake_channel  string
-- ARGV[2] stored        int     messages without an id, added by this transaction
-- ARGV[3] first_member  string  the first of these, "" if there are none
-- ARGV[4] rejected      int     lines that are not accepted
-- ARGV[5] now_ms        int     "" means the server's clock; tests pass their own
-- ARGV[6] moves         int     number of markers
-- ARGV[7] buckets       int     number of buckets
-- then for each move: part id, marker; then for each bucket: bucket_start_ms
-- then for each message with an id: number of its bucket from 1, due_ms, member, idempotency_key
-- Returns {stored, duplicates}: duplicates are the numbers, from 0, of those messages with an id whose idempotency key is known
--
-- include common
-- include places
local buckets, markers, places, ids, cancelled, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local wake_channel, stored, rejected = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local now_ms, move_count, bucket_count = clock_ms(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local is_new = {[ARGV[3]] = true} -- the first message without an id, and all that have one
local FIRST_MARKER, FIRST_MOVE = 7, 8
local first_bucket, first_start = FIRST_MARKER + move_count, FIRST_MOVE + 2 * move_count

-- A key that holds something else ends the script here: no id is remembered and no marker moved for what is not stored.
local bucket_keys, arguments = {}, ARGV
for bucket = 0, bucket_count - 1 do
  bucket_keys[bucket + 1] = KEYS[first_bucket + bucket]
  redis.call('ZCARD', KEYS[first_bucket + bucket])
end

-- include identified
for bucket = 0, bucket_count - 1 do
  if redis.call('ZCARD', KEYS[first_bucket + bucket]) > 0 then
    redis.call('ZADD', buckets, ARGV[first_start + bucket], ARGV[first_start + bucket])
  end
end

for move = 0, move_count - 1 do
  redis.call('SET', KEYS[FIRST_MARKER + move], ARGV[FIRST_MOVE + 2 * move + 1])
  redis.call('ZADD', markers, text(now_ms), ARGV[FIRST_MOVE + 2 * move])
end
for name, count in pairs({stored = stored, duplicates = #duplicates, rejected = rejected}) do
  if count > 0 then
    redis.call('HINCRBY', counters, name, count)
  end
end

-- A message that is due before everything else wakes the loops, which sleep until the time they know.
local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
for bucket = 0, bucket_count - 1 do
  if ARGV[first_start + bucket] == oldest then
    local head = redis.call('ZRANGE', KEYS[first_bucket + bucket], 0, 0, 'WITHSCORES')
    if is_new[head[1]] then
      redis.call('PUBLISH', wake_channel, text(tonumber(head[2])))
    end
  end
end
return {stored, duplicates}
