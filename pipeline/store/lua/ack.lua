#!lua flags=allow-oom
-- Forget the first messages of a claim: they are delivered. Only the holder of an unexpired lease can, and saying it twice counts once.
-- The holder is who knows the token and the end of its lease: a request to claim that was given up and comes late, when the claim of
-- its token is over, makes another one under that token, and it must not be acknowledged for the first.
--
-- KEYS[1] claims    ZSET  lease token -> lease_until_ms
-- KEYS[2] claim     LIST  member, due_ms, … of this token, without what is acknowledged
-- KEYS[3] attempts  HASH  message_id -> claims that ended without acknowledgement
-- KEYS[4] places     HASH  idempotency key -> place, see include/places.lua
-- KEYS[5] ids       ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[6] counters  HASH
-- ARGV[1] lease_token     string
-- ARGV[2] lease_until_ms  int   of the claim that was made
-- ARGV[3] claimed         int   messages in the claim when it was made
-- ARGV[4] delivered       int   messages delivered since then, from its beginning
-- ARGV[5] id_retention_ms    int   how long an idempotency key is known after its message was delivered
-- ARGV[6] now_ms          int   "" means the server's clock; tests pass their own
-- ARGV[7..] of each message that this call acknowledges and that has an idempotency key: its message id, the key
-- Returns {"OK", acknowledged by this call} or {"LOST", 0}: the lease is over, the messages are somebody else's
--
-- include common
-- include places
local claims, claim, attempts, places, ids, counters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local lease_token, lease_until_ms = ARGV[1], tonumber(ARGV[2])
local claimed, delivered = tonumber(ARGV[3]), tonumber(ARGV[4])
local id_retention_ms, now_ms = tonumber(ARGV[5]), clock_ms(ARGV[6])
local FIRST_ID = 7

local held_until_ms = redis.call('ZSCORE', claims, lease_token)
if not held_until_ms or tonumber(held_until_ms) ~= lease_until_ms or lease_until_ms <= now_ms then
  redis.call('HINCRBY', counters, 'late_acks', 1)
  return {'LOST', 0}
end

local before = claimed - redis.call('LLEN', claim) / 2
local count = delivered - before
if count > 0 then
  if redis.call('EXISTS', attempts) == 1 then
    local rows = redis.call('LRANGE', claim, 0, 2 * count - 1)
    for at = 1, #rows, 2 do
      redis.call('HDEL', attempts, string.sub(rows[at], 1, MESSAGE_ID_LENGTH))
    end
  end
  for at = FIRST_ID, #ARGV, 2 do
    leave_places(places, ids, ARGV[at + 1], ARGV[at], text(now_ms + id_retention_ms))
  end
  if #ARGV >= FIRST_ID then
    forget_over(ids, now_ms)
  end
  redis.call('HINCRBY', counters, 'delivered', count)
  redis.call('LTRIM', claim, 2 * count, -1)
end
if delivered == claimed then
  redis.call('ZREM', claims, lease_token)
end
return {'OK', math.max(count, 0)}
