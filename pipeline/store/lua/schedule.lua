#!lua
-- Store one chunk of a landing file, each line exactly once: whatever is replayed, retried or run twice at the same time.
-- Without the flag allow-oom a server that is out of memory refuses the script as a whole: nothing is half stored.
--
-- KEYS[1] buckets   ZSET  bucket_start_ms of every bucket that is not empty
-- KEYS[2] fences    HASH  file token -> last line stored
-- KEYS[3] ids       ZSET  caller's id -> epoch ms at which it is forgotten
-- KEYS[4] counters  HASH
-- KEYS[5..] bucket  ZSET  member -> due_ms, one key for each group below
-- ARGV[1] file_token     string
-- ARGV[2] previous_line  int     line at which the preceding chunk of the file ended, 0 at its first
-- ARGV[3] last_line      int     line at which this chunk ends
-- ARGV[4] rejected       int     lines of this chunk that are not accepted
-- ARGV[5] wake_channel   string
-- ARGV[6] with_ids       int     number of messages with an id of their caller, last in ARGV
-- then for each KEYS[5..]: bucket_start_ms, count, and count times due_ms, member
-- then with_ids times: number of the bucket's key among KEYS[5..] from 1, due_ms, member, caller_id
-- Returns {"OK", stored, known, fence}: known were stored before, by this file or under the same caller's id
--         {"GAP", 0, 0, fence}: the chunk before this one is not stored, so nothing was done
local buckets, fences, ids, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local file_token, previous_line, last_line = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rejected, wake_channel, with_ids = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local FIRST_BUCKET_KEY = 5
local PAIRS_PER_CALL = 2000 -- unpack() fails at 8000 values
local MESSAGE_ID_LENGTH, TOKEN_LENGTH = 22, 14

local fence = tonumber(redis.call('HGET', fences, file_token) or '0')
if fence < previous_line then
  return {'GAP', 0, 0, tostring(fence)}
end

local function is_stored(member)
  local line = tonumber(string.sub(member, TOKEN_LENGTH + 1, MESSAGE_ID_LENGTH), 16)
  return line <= fence
end

local stored, known = 0, 0

-- A newcomer that is due before everything else must wake the loops, which sleep until the time they know.
local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
local earliest_due = math.huge
if oldest then
  earliest_due = tonumber(oldest) -- nothing in its bucket is due before the bucket begins
end
local function head_of(bucket)
  local head = redis.call('ZRANGE', bucket, 0, 0, 'WITHSCORES')
  return head[2] and tonumber(head[2]) or math.huge
end

local cursor = 7
local newcomer_due = math.huge
local starts = {}
for group = 1, #KEYS - FIRST_BUCKET_KEY + 1 do
  local bucket = KEYS[FIRST_BUCKET_KEY + group - 1]
  local bucket_start, count = ARGV[cursor], tonumber(ARGV[cursor + 1])
  cursor = cursor + 2
  starts[group] = bucket_start
  if bucket_start == oldest then
    earliest_due = head_of(bucket)
  end
  local stop = cursor + 2 * count - 1
  local added = 0
  if count > 0 and fence <= previous_line then
    if tonumber(ARGV[cursor]) < newcomer_due then
      newcomer_due = tonumber(ARGV[cursor]) -- a group comes sorted by due_ms
    end
    for first = cursor, stop, 2 * PAIRS_PER_CALL do
      added = added + redis.call('ZADD', bucket, unpack(ARGV, first, math.min(first + 2 * PAIRS_PER_CALL - 1, stop)))
    end
  elseif fence < last_line then -- the chunk was cut elsewhere the last time: take what lies behind the fence
    for first = cursor, stop, 2 do
      if not is_stored(ARGV[first + 1]) then
        newcomer_due = math.min(newcomer_due, tonumber(ARGV[first]))
        added = added + redis.call('ZADD', bucket, ARGV[first], ARGV[first + 1])
      end
    end
  end
  stored = stored + added
  known = known + count - added
  if added > 0 then
    redis.call('ZADD', buckets, bucket_start, bucket_start)
  end
  cursor = stop + 1
end

for row = 1, with_ids do
  local group, due_ms, member, caller_id = tonumber(ARGV[cursor]), ARGV[cursor + 1], ARGV[cursor + 2], ARGV[cursor + 3]
  cursor = cursor + 4
  if is_stored(member) or redis.call('ZADD', ids, 'NX', '+inf', caller_id) == 0 then
    known = known + 1
  else
    newcomer_due = math.min(newcomer_due, tonumber(due_ms))
    redis.call('ZADD', KEYS[FIRST_BUCKET_KEY + group - 1], due_ms, member)
    redis.call('ZADD', buckets, starts[group], starts[group])
    stored = stored + 1
  end
end

if fence < last_line then
  redis.call('HSET', fences, file_token, last_line)
  redis.call('HINCRBY', counters, 'stored', stored)
  if known > 0 then
    redis.call('HINCRBY', counters, 'known', known)
  end
  if rejected > 0 and fence <= previous_line then -- of a chunk cut elsewhere before, some are counted already
    redis.call('HINCRBY', counters, 'rejected', rejected)
  end
  fence = last_line
end
if newcomer_due < earliest_due then
  redis.call('PUBLISH', wake_channel, string.format('%.0f', newcomer_due))
end
return {'OK', stored, known, tostring(fence)}
