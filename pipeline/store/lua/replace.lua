#!lua
-- Store a message in place of the one that waits with the same idempotency key, or as the first one with it. Of several replacements
-- the one with the greatest message id stays, whichever comes last, and any replaces what is none. Atomic against all that moves it.
-- A script of its own, not a verb of by_id.lua, as it needs memory: without the flag allow-oom a full server refuses it.
--
-- As in by_id.lua the caller says where it takes the message that waits to be, and is told if it is elsewhere by now.
--
-- KEYS[1] places      HASH    idempotency key -> place, see include/places.lua
-- KEYS[2] ids        ZSET    idempotency key -> epoch ms at which it is forgotten
-- KEYS[3] cancelled  ZSET    idempotency key -> epoch ms at which it is forgotten
-- KEYS[4] buckets    ZSET    bucket_start_ms of every bucket that is not empty
-- KEYS[5] set        ZSET    member -> due_ms: the bucket or the held messages of that place
-- KEYS[6] new_bucket ZSET    member -> due_ms: the bucket of the new message
-- KEYS[7] attempts   HASH    message_id -> claims that ended without acknowledgement
-- KEYS[8] counters   HASH
-- KEYS[9] cold       HASH    hour since the epoch -> how many messages that are due in it wait in cold files
-- ARGV[1] name               string  the idempotency key
-- ARGV[2] place              string  "" if `places` had none
-- ARGV[3] member             string  of the new message
-- ARGV[4] due_ms             int     of the new message
-- ARGV[5] lifts_cancellation int     1: store it also if the key was cancelled, and forget that
-- ARGV[6] now_ms             int     "" means the server's clock; tests pass their own
-- ARGV[7] wake_channel       string
-- Returns {status, member, score}
--   STORED     nothing waited; member and score are those of the new message
--   OK         member and score are those of the message that waits now: the new one, if this call or an earlier one stored it, or
--              a replacement with a greater message id, which stays
--   MOVED      nothing was done; member is the place where it is now, "" if it is nowhere: ask again for that one
--   IN_FLIGHT  a drain loop has the message with this key; nothing was done
--   DELIVERED  it has left the schedule; nothing was done
--   CANCELLED  the key was cancelled; nothing was done
--
-- include common
-- include member
-- include places
-- include cold
-- include waiting
local places, ids, cancelled, buckets = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local set, new_bucket, attempts, counters = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local cold, cold_hour = KEYS[9], hour_of_cold(ARGV[2])
local name, place, new_member, new_due_ms, lifts_cancellation = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local now_ms, wake_channel = clock_ms(ARGV[6]), ARGV[7]

local found = redis.call('HGET', places, name) or ''
if found ~= place then
  return {'MOVED', found, ''}
end
if place == '' and is_remembered(ids, name, now_ms) then
  return {'DELIVERED', '', ''}
end
local message_id, score, held_topic, member
if place ~= '' and not cold_hour then
  message_id, score, held_topic = read_place(place)
  member = find(set, message_id, score)
  if not member then
    return {'IN_FLIGHT', '', ''}
  end
end
if not lifts_cancellation and is_remembered(cancelled, name, now_ms) then
  return {'CANCELLED', '', ''}
end
local new_id = string.sub(new_member, 1, MESSAGE_ID_LENGTH)
if member and (new_id == message_id or (is_of_replacement(place) and is_before(new_id, message_id))) then
  return {'OK', member, score}
end

local start = bucket_start(tonumber(new_due_ms))
redis.call('ZADD', new_bucket, new_due_ms, new_member)
redis.call('ZADD', buckets, start, start)
redis.call('HSET', places, name, place_of(new_member, new_due_ms, nil, true))
if cold_hour then
  count_cold(cold, cold_hour, -1)
elseif member then
  remove(set, member, score, held_topic, buckets)
  redis.call('HDEL', attempts, message_id)
else
  redis.call('HINCRBY', counters, 'stored', 1)
end
if lifts_cancellation then
  redis.call('ZREM', cancelled, name)
end
ring_if_first(buckets, start, new_bucket, new_member, new_due_ms, wake_channel)
return {(member or cold_hour) and 'OK' or 'STORED', new_member, new_due_ms}
