#!lua flags=allow-oom
-- Put messages back that came due while their topic was paused: those of one bucket, the oldest first, so many at a time.
--
-- KEYS[1] pauses   HASH  topic -> epoch ms since when it is paused
-- KEYS[2] held     ZSET  member -> due_ms, of the topic
-- KEYS[3] buckets  ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[4] bucket   ZSET  member -> due_ms
-- KEYS[5] places    HASH  idempotency key -> place, see include/places.lua
-- ARGV[1] topic            string
-- ARGV[2] bucket_start_ms  int     of KEYS[4]
-- ARGV[3] limit            int     messages, at most
-- ARGV[4] bytes_max        int     bytes of members after which it is enough
-- ARGV[5] wake_channel     string
-- Returns {status, messages put back, the bucket_start_ms of the first that is left or ""}: status is OK, or PAUSED if the topic
-- is (again), and then nothing was done
--
-- include common
-- include member
-- include places
local pauses, held, buckets, bucket, places = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local topic, bucket_start_ms, limit, bytes_max, wake_channel = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local PAGE = 20 -- messages a step, so that bytes_max is passed by one page at most

if redis.call('HEXISTS', pauses, topic) == 1 then
  return {'PAUSED', 0, ''}
end
local last_ms = text(tonumber(bucket_start_ms) + BUCKET_WIDTH_MS - 1)
local has_places = redis.call('EXISTS', places) == 1
local count, bytes = 0, 0
while count < limit and bytes < bytes_max do
  local page = math.min(PAGE, limit - count)
  local rows = redis.call('ZRANGE', held, bucket_start_ms, last_ms, 'BYSCORE', 'LIMIT', 0, page, 'WITHSCORES')
  if #rows == 0 then
    break
  end
  for at = 1, #rows, 2 do
    redis.call('ZADD', bucket, rows[at + 1], rows[at])
    local body = has_places and read_member(rows[at])
    if body and body.id and not body.group then
      note_place(places, body.id, rows[at], rows[at + 1])
    end
  end
  redis.call('ZADD', buckets, bucket_start_ms, bucket_start_ms)
  for at = 1, #rows, 2 do
    redis.call('ZREM', held, rows[at])
    count, bytes = count + 1, bytes + #rows[at]
  end
end
if count > 0 then
  redis.call('PUBLISH', wake_channel, bucket_start_ms)
end
local first = redis.call('ZRANGE', held, 0, 0, 'WITHSCORES')[2]
return {'OK', count, first and bucket_start(tonumber(first)) or ''}
