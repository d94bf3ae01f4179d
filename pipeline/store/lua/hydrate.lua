#!lua
-- Finish a transaction that brings cold messages into Redis, and has just added those without an idempotency key to their buckets: add the
-- others, index the buckets, count and move the markers. A message with a key comes only if its place is still the one that it has in its
-- cold file: otherwise it was cancelled, replaced or rescheduled, or another message had the key before it. It runs inside MULTI, behind
-- WATCH on the markers. Without the flag allow-oom a server that is out of memory refuses the transaction as a whole.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] markers   ZSET  part id -> epoch ms at which its marker moved last
-- KEYS[3] cold      HASH  hour since the epoch -> how many messages that are due in it wait in cold files
-- KEYS[4] places    HASH  idempotency key -> place, see include/places.lua
-- KEYS[5..] marker  STRING  one for each move; then bucket ZSET  member -> due_ms, one for each bucket
-- ARGV[1] wake_channel  string
-- ARGV[2] now_ms        int     "" means the server's clock; tests pass their own
-- ARGV[3] moves         int     number of markers
-- ARGV[4] buckets       int     number of buckets
-- ARGV[5] hours         int     number of hours in which messages without an idempotency key are due
-- then for each move: part id, marker; then for each bucket: bucket_start_ms; then for each of these hours: the hour, how many; then for
-- each message with a key: the key, its place in its cold file, due_ms, member, number of the bucket from 0
-- Returns how many messages with a key came
--
-- include common
-- include member
-- include places
-- include cold
local buckets, markers, cold, places = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local wake_channel, now_ms = ARGV[1], clock_ms(ARGV[2])
local move_count, bucket_count, hour_count = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local FIRST_MARKER, FIRST_MOVE, VALUES = 5, 6, 5
local first_bucket, first_start = FIRST_MARKER + move_count, FIRST_MOVE + 2 * move_count
local first_hour = first_start + bucket_count
local first_row = first_hour + 2 * hour_count

-- A key that holds something else ends the script here: no marker is moved for what is not stored.
redis.call('HGET', cold, '0')
redis.call('HGET', places, '')
for bucket = 0, bucket_count - 1 do
  redis.call('ZCARD', KEYS[first_bucket + bucket])
end

local came, left = 0, {}
for row = first_row, #ARGV, VALUES do
  local name, place, due_ms, member, bucket = ARGV[row], ARGV[row + 1], ARGV[row + 2], ARGV[row + 3], tonumber(ARGV[row + 4])
  if redis.call('HGET', places, name) == place then
    redis.call('ZADD', KEYS[first_bucket + bucket], due_ms, member)
    redis.call('HSET', places, name, place_of(member, due_ms))
    local hour = hour_of(due_ms)
    left[hour] = (left[hour] or 0) + 1
    came = came + 1
  end
end

for bucket = 0, bucket_count - 1 do
  if redis.call('EXISTS', KEYS[first_bucket + bucket]) == 1 then
    redis.call('ZADD', buckets, ARGV[first_start + bucket], ARGV[first_start + bucket])
  end
end
for move = 0, move_count - 1 do
  redis.call('SET', KEYS[FIRST_MARKER + move], ARGV[FIRST_MOVE + 2 * move + 1])
  redis.call('ZADD', markers, text(now_ms), ARGV[FIRST_MOVE + 2 * move])
end
for index = first_hour, first_row - 1, 2 do
  left[ARGV[index]] = (left[ARGV[index]] or 0) + tonumber(ARGV[index + 1])
end
for hour, count in pairs(left) do
  count_cold(cold, hour, -count)
end

-- Loops sleep until the time that they know; most of what comes is due hours later, and not before everything else.
local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
if bucket_count > 0 and ARGV[first_start] == oldest then
  local head = redis.call('ZRANGE', KEYS[first_bucket], 0, 0, 'WITHSCORES')
  redis.call('PUBLISH', wake_channel, text(tonumber(head[2])))
end
return came
