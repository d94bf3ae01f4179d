#!lua flags=allow-oom
-- Make a dead letter of a message that Kafka does not take. Refused unless the caller holds the lease: somebody else may have written
-- the message meanwhile.
--
-- KEYS[1] outbox    STREAM
-- KEYS[2] forwarder  STRING  the lease of who writes the outbox to Kafka
-- KEYS[3] dead      STREAM  of the message's topic
-- KEYS[4] topics    SET     topics that have a stream, dead letters or held messages
-- KEYS[5] counters  HASH
-- KEYS[6] dead_topics  SET  topics that have dead letters
-- ARGV[1] token   string  of the lease
-- ARGV[2] id      string  of the entry
-- ARGV[3] topic   string
-- ARGV[4] reason  string
-- ARGV[5] detail  string
-- ARGV[6] now_ms  int     "" means the server's clock; tests pass their own
-- Returns OK, GONE: it is not in the outbox (any more), or LOST: the lease is over
--
-- include common
-- include member
local outbox, forwarder, dead, topics, counters, dead_topics = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local token, id, topic, reason, detail, now_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], text(clock_ms(ARGV[6]))

if redis.call('GET', forwarder) ~= token then
  return 'LOST'
end

local entry = redis.call('XRANGE', outbox, id, id)[1]
if not entry then
  return 'GONE'
end
-- A key that holds something else ends the script here, before it has done anything that another try would do again.
redis.call('XLEN', dead)
redis.call('SCARD', topics)
redis.call('SCARD', dead_topics)
redis.call('HLEN', counters)
local fields = entry[2]
if #fields == 2 and string.find(fields[1], '^%-?%d+$') then -- a message as it was scheduled
  local due_ms, member = fields[1], fields[2]
  local body = read_member(member)
  fields = {
    'id', body.id or string.sub(member, 1, MESSAGE_ID_LENGTH), 'message', body.message, 'topic', body.topic, 'due_ms', due_ms,
    'attempt', '1', body.headers and 'headers', body.headers and cjson.encode(body.headers)
  }
end
for _, value in ipairs({'reason', reason, 'detail', detail, 'group', '', 'died_ms', now_ms}) do
  fields[#fields + 1] = value
end
redis.call('XADD', dead, '*', unpack(fields))
redis.call('SADD', topics, topic)
redis.call('SADD', dead_topics, topic)
redis.call('HINCRBY', counters, 'dead', 1)
redis.call('XDEL', outbox, id)
return 'OK'
