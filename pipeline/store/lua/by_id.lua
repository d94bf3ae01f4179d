#!lua flags=allow-oom
-- Get, cancel or reschedule one message that waits, by its idempotency key or by its handle. Atomic against all that moves it.
--
-- A script may touch only keys that it is given, so the caller says where it takes the message to be: what `places` says of an
-- idempotency key, or what the handle of a message without one says by itself. If it is elsewhere by now, nothing is done and the
-- reply says where. Of a handle this is found out here, by keys that are built of the same shard: it may be held of any topic.
--
-- KEYS[1] places      HASH    idempotency key -> place, see include/places.lua
-- KEYS[2] ids        ZSET    idempotency key -> epoch ms at which it is forgotten
-- KEYS[3] cancelled  ZSET    idempotency key or handle -> epoch ms at which it is forgotten
-- KEYS[4] buckets    ZSET    bucket_start_ms of every bucket that is not empty
-- KEYS[5] set        ZSET    member -> due_ms: the bucket or the held messages of that place
-- KEYS[6] new_bucket ZSET    member -> due_ms; to reschedule: the bucket of the new due time, else KEYS[5]
-- KEYS[7] attempts   HASH    message_id -> claims that ended without acknowledgement
-- KEYS[8] counters   HASH
-- KEYS[9] cold       HASH    hour since the epoch -> how many messages that are due in it wait in cold files
-- KEYS[10] held_topics ZSET  topic -> epoch ms at which the next message that is held of it may go, of topics that are not paused
-- KEYS[11] pauses    HASH    topic -> epoch ms since when it is paused
-- ARGV[1] verb              get, cancel or reschedule
-- ARGV[2] name              string  the idempotency key, or the handle
-- ARGV[3] place             string  "" if `places` had none
-- ARGV[4] is_handle         int     1: the place is what the handle says, or an answer has said; `places` has nothing of it
-- ARGV[5] due_ms            int     to reschedule, else ""
-- ARGV[6] id_retention_ms   int     how long it is known that a message was cancelled
-- ARGV[7] now_ms            int     "" means the server's clock; tests pass their own
-- ARGV[8] in_any_case       int     1: to cancel: also remember an idempotency key of which nothing waits, so that what comes later with
--                                   it is not stored
-- ARGV[9] wake_channel      string
-- ARGV[10] cold_member      string  to reschedule: the member of the message that waits in a cold file at that place, else ""
-- Returns {status, member, score}
--   OK         done; member and score are those of the message, after it was rescheduled its new ones; "" if a cold one is cancelled
--   COLD       nothing was done: it waits in a cold file, which has its member
--   MOVED      nothing was done; member is the place where it is now: ask again for that one
--   IN_FLIGHT  a drain loop has it: it is delivered
--   DELIVERED  it has left the schedule
--   CANCELLED  it was cancelled before
--   UNKNOWN    nothing is known of it
--   of these four nothing was done, but for what in_any_case says
--
-- include common
-- include member
-- include places
-- include cold
-- include waiting
local places, ids, cancelled, buckets = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local set, new_bucket, attempts, counters = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local cold, cold_member, held_topics, pauses = KEYS[9], ARGV[10], KEYS[10], KEYS[11]
local verb, name, place, is_handle, new_due_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5]
local now_ms, in_any_case, wake_channel = clock_ms(ARGV[7]), ARGV[8] == '1', ARGV[9]
local forget_ms = text(now_ms + tonumber(ARGV[6]))
local shard = string.sub(buckets, 1, -#'buckets' - 1) -- what all keys of the shard begin with
local TOPICS_MAX = 100 -- of which something may be held, and as many that are paused: the server answers nobody else meanwhile

local function remember_cancelled()
  forget_over(cancelled, now_ms)
  redis.call('ZADD', cancelled, 'GT', forget_ms, name)
end

-- Answer that nothing waits. What was in flight when its key was cancelled in any case is delivered, and both are remembered.
local function nothing_waits(is_in_flight)
  local status = is_remembered(cancelled, name, now_ms) and 'CANCELLED' or 'UNKNOWN'
  if is_in_flight then
    status = 'IN_FLIGHT'
  elseif is_remembered(ids, name, now_ms) then
    status = 'DELIVERED'
  end
  if in_any_case then
    remember_cancelled()
  end
  return {status, '', ''}
end

local found = is_handle and place or redis.call('HGET', places, name)
if not found then
  return nothing_waits(false)
end
if found ~= place then
  return {'MOVED', found, ''}
end
local cold_hour = hour_of_cold(place)
if cold_hour then
  if verb == 'get' or (verb == 'reschedule' and cold_member == '') then
    return {'COLD', '', ''}
  end
  count_cold(cold, cold_hour, -1)
  if verb == 'cancel' then
    remember_cancelled()
    redis.call('HDEL', places, name)
    redis.call('HINCRBY', counters, 'cancelled', 1)
    return {'OK', '', ''}
  end
  local start = bucket_start(tonumber(new_due_ms))
  redis.call('ZADD', new_bucket, new_due_ms, cold_member)
  redis.call('ZADD', buckets, start, start)
  redis.call('HSET', places, name, place_of(cold_member, new_due_ms))
  ring_if_first(buckets, start, new_bucket, cold_member, new_due_ms, wake_channel)
  return {'OK', cold_member, new_due_ms}
end
local message_id, score, held_topic = read_place(place)
local member = find(set, message_id, score)

-- Return the place of a message without an idempotency key that is not where it was taken to be; nil if it is nowhere.
local function place_elsewhere()
  if held_topic ~= '' and find(shard .. 'bucket:' .. bucket_start(tonumber(score)), message_id, score) then
    return message_id .. score
  end
  for _, topics in ipairs({redis.call('ZRANGE', held_topics, 0, TOPICS_MAX - 1), redis.call('HKEYS', pauses)}) do
    for index = 1, math.min(#topics, TOPICS_MAX) do
      if find(shard .. 'held:' .. topics[index], message_id, score) then
        return place_of(message_id, score, topics[index])
      end
    end
  end
end

local elsewhere = is_handle and not member and place_elsewhere()
if elsewhere then
  return {'MOVED', elsewhere, ''}
end
local body = member and string.sub(member, FORM_AT, FORM_AT) ~= 'm' and read_member(member)
local key = body and body.id ~= message_id and body.id or nil
if not member or (is_handle and key) then -- a handle leads only to what has no idempotency key: places would not know
  return nothing_waits(not is_handle)
end
if verb == 'get' then
  return {'OK', member, score}
end

if verb == 'cancel' then
  remember_cancelled()
  redis.call('HDEL', places, name)
  remove(set, member, score, held_topic, buckets)
  redis.call('HDEL', attempts, message_id)
  redis.call('HINCRBY', counters, 'cancelled', 1)
  return {'OK', member, score}
end

-- What was redriven is as if it were new: it says no longer when it was due first.
local new_member = member
if string.sub(member, FORM_AT, FORM_AT) == 'r' then
  local headers = body.headers and next(body.headers) and body.headers or nil
  new_member = message_id .. 'j' .. cjson.encode({message = body.message, topic = body.topic, id = key, headers = headers})
end
local start = bucket_start(tonumber(new_due_ms))
if new_member ~= member or set ~= new_bucket then
  redis.call('ZADD', new_bucket, new_due_ms, new_member)
  redis.call('ZADD', buckets, start, start)
  remove(set, member, score, held_topic, buckets)
else
  redis.call('ZADD', set, new_due_ms, member)
end
if not is_handle then
  redis.call('HSET', places, name, place_of(new_member, new_due_ms, nil, is_of_replacement(place)))
end
ring_if_first(buckets, start, new_bucket, new_member, new_due_ms, wake_channel)
return {'OK', new_member, new_due_ms}
