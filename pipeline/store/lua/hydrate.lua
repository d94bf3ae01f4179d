#!lua
-- Finish a transaction that brings cold messages into Redis, and has just added them to their buckets, with the places of those that have
-- an idempotency key: index the buckets, count and move the markers. It runs inside MULTI, behind WATCH on the markers. Without the flag
-- allow-oom a server that is out of memory refuses the transaction as a whole.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] markers   ZSET  part id -> epoch ms at which its marker moved last
-- KEYS[3] cold      HASH  hour since the epoch -> how many messages that are due in it wait in cold files
-- KEYS[4..] marker  STRING  one for each move; then places HASH, then bucket ZSET  member -> due_ms, one for each bucket
-- then, if check_cold.lua was at the beginning: aside, for places and for each bucket
-- ARGV[1] wake_channel  string
-- ARGV[2] now_ms        int     "" means the server's clock; tests pass their own
-- ARGV[3] moves         int     number of markers
-- ARGV[4] buckets       int     number of buckets
-- then for each move: part id, marker; then for each bucket: bucket_start_ms; then for each hour of these messages: the hour, how many
-- Returns nothing: a MULTI whose beginning has set something aside has done nothing
--
-- include common
-- include cold
-- include aside
local buckets, markers, cold = KEYS[1], KEYS[2], KEYS[3]
local wake_channel, now_ms, move_count, bucket_count = ARGV[1], clock_ms(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local FIRST_MARKER, FIRST_MOVE = 4, 5
local places, first_start = FIRST_MARKER + move_count, FIRST_MOVE + 2 * move_count
local first_bucket, written = places + 1, 1 + bucket_count

if KEYS[places + written] and not were_let_be(KEYS, places, written) then
  return {}
end

-- A key that holds something else ends the script here: no marker is moved for what is not stored.
redis.call('HGET', cold, '0')
for bucket = 0, bucket_count - 1 do
  redis.call('ZCARD', KEYS[first_bucket + bucket])
end

for bucket = 0, bucket_count - 1 do
  redis.call('ZADD', buckets, ARGV[first_start + bucket], ARGV[first_start + bucket])
end
for move = 0, move_count - 1 do
  redis.call('SET', KEYS[FIRST_MARKER + move], ARGV[FIRST_MOVE + 2 * move + 1])
  redis.call('ZADD', markers, text(now_ms), ARGV[FIRST_MOVE + 2 * move])
end
for index = first_start + bucket_count, #ARGV, 2 do
  count_cold(cold, ARGV[index], -tonumber(ARGV[index + 1]))
end

-- Loops sleep until the time that they know; most of what comes is due hours later, and not before everything else.
local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
if bucket_count > 0 and ARGV[first_start] == oldest then
  local head = redis.call('ZRANGE', KEYS[first_bucket], 0, 0, 'WITHSCORES')
  redis.call('PUBLISH', wake_channel, text(tonumber(head[2])))
end
return {}
