#!lua flags=allow-oom
-- Take the oldest due messages out of one bucket, each to where its topic goes: those for the screen in flight, under a lease; the
-- others into the stream of their topic, or into the outbox of all topics for Kafka, where their schedule ends in the same moment.
-- Asking again with the same token gives the same messages for the screen, so a lost reply costs nothing; what moved is not reported
-- again. allow-oom: a server that is full must still be able to get rid of messages.
--
-- Nobody knows which topics come next, and a script may touch only keys that it is given. The caller therefore gives the targets that
-- it expects: the keys that messages move to. The first message whose target is not among them ends the claim, and the reply says
-- which targets the messages from there on need.
--
-- A target is, behind what all keys of the shard begin with, one of
--   stream:<topic>, outbox:kafka, retry:<topic>:<group>, dead:<topic>, held:<topic>, bucket:<bucket_start_ms>
--
-- Only the keys of what is held, and of where that goes, are built here (include/turns.lua), of the same shard: nobody can know them.
--
-- KEYS[1] buckets   ZSET    bucket_start_ms of every bucket that is not empty
-- KEYS[2] bucket    ZSET    member -> due_ms; the bucket that the caller takes for the oldest
-- KEYS[3] claims    ZSET    lease token -> lease_until_ms
-- KEYS[4] claim     LIST    member, due_ms, … of this token
-- KEYS[5] attempts  HASH    message_id -> claims that ended without acknowledgement
-- KEYS[6] pauses    HASH    topic -> epoch ms since when it is paused
-- KEYS[7] places     HASH    idempotency key -> place, see include/places.lua
-- KEYS[8] ids       ZSET    idempotency key -> epoch ms at which it is forgotten
-- KEYS[9] counters  HASH
-- KEYS[10] rate_limits  HASH  topic -> epoch ms at which its next message may go, of topics with a max_rate
-- KEYS[11] topics   SET     topics that have a stream, dead letters or held messages
-- KEYS[12] topic_settings  HASH  topic, or * for all topics -> settings as a JSON object
-- KEYS[13] held_topics     ZSET  topic -> epoch ms at which the next message that is held of it may go, of topics that are not paused
-- KEYS[14] dead_topics     SET     topics that have dead letters
-- KEYS[15..] target         STREAM or ZSET
-- ARGV[1] bucket_start_ms  int     of KEYS[2]
-- ARGV[2] lease_token      string
-- ARGV[3] claim_limit      int     messages, at most
-- ARGV[4] claim_bytes_max  int     bytes of members after which the claim is full
-- ARGV[5] lease_ms         int
-- ARGV[6] id_retention_ms  int     how long an idempotency key is known after its message was delivered
-- ARGV[7] now_ms           int     "" means the server's clock; tests pass their own
-- ARGV[8] shards           int     how many share the max_rate of a topic
-- ARGV[9] look_ahead       int     1: say which targets the messages behind this claim need, too
-- Returns {status, now_ms, first lease_until_ms of all claims or "", detail, rows, attempts, moved, wanted}
--   OK      rows are member, due_ms, …; attempts are one number a message, or empty if all are 0; detail is lease_until_ms
--   MOVED   nothing for the screen, but something was due: ask again
--   TARGET  nothing was done: ask again and give what is wanted
--   WAIT    nothing may go; detail is when the next may: when it is due, or its rate limit allows it
--   BUCKET  another bucket is the oldest; detail is its bucket_start_ms: ask again for that one
--   EMPTY   nothing is scheduled; detail is ""
-- moved is due_ms:topic:group:when it came in, as its id says, for each message that went into a stream; group is "" but for retries.
-- Of a message that differs from the one before in its due time alone it is due_ms. wanted are the targets that the next messages need
--
-- include common
local buckets, bucket, claims, claim, attempts, pauses = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local places, ids, counters, rate_limits, topics, topic_settings = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local held_topics, dead_topics, bucket_start_ms, lease_token = KEYS[13], KEYS[14], ARGV[1], ARGV[2]
local claim_limit, claim_bytes_max, lease_ms = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local id_retention_ms, now_ms, shards, look_ahead = tonumber(ARGV[6]), clock_ms(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == '1'
local FIRST_TARGET = 15
local PAGE = 100 -- messages a step, so that claim_bytes_max is passed by one page at most
local REPAIRS_MAX = 100 -- entries of the index a call

local function due_text(score)
  -- The usual score stands as it is: writing each of 500 anew took a quarter of the script's time.
  return #score < 16 and string.find(score, '^%d+$') and score or text(tonumber(score))
end

local function tries_before(member)
  return redis.call('HGET', attempts, string.sub(member, 1, MESSAGE_ID_LENGTH)) or '0'
end

local is_tried = redis.call('EXISTS', attempts) == 1
local wanted, is_wanted = {}, {}

local function reply(status, detail, rows, moved)
  local first_lease = redis.call('ZRANGE', claims, 0, 0, 'WITHSCORES')[2]
  local tried = {}
  if rows and is_tried then
    for index = 1, #rows, 2 do
      tried[#tried + 1] = tries_before(rows[index])
    end
  end
  return {status, text(now_ms), first_lease and text(tonumber(first_lease)) or '', detail, rows or {}, tried, moved or {}, wanted}
end

local held_until = redis.call('ZSCORE', claims, lease_token)
if held_until then
  return reply('OK', text(tonumber(held_until)), redis.call('LRANGE', claim, 0, -1))
end

-- Return the start of the oldest bucket. Any client may write the index: what is no number is taken out, as no bucket can have such a
-- name, and what stands at the wrong place is put right. After REPAIRS_MAX repairs it returns the caller's bucket; the next
-- call repairs more.
local function oldest_bucket()
  for _ = 1, REPAIRS_MAX do
    local entry = redis.call('ZRANGE', buckets, 0, 0, 'WITHSCORES')
    local name, start_ms = entry[1], tonumber(entry[1])
    if not name then
      return nil
    end
    local is_start = start_ms and string.find(name, '^-?%d+$') and text(start_ms) == name and name ~= '-0'
    if is_start and tonumber(entry[2]) == start_ms then
      return name
    end
    if is_start then
      redis.call('ZADD', buckets, name, name)
    else
      redis.call('ZREM', buckets, name)
    end
    redis.call('HINCRBY', counters, 'misfiled', 1)
  end
  return bucket_start_ms
end

-- The index has no bucket that is empty.
local function close_empty_bucket()
  if redis.call('EXISTS', bucket) == 0 then
    redis.call('ZREM', buckets, bucket_start_ms)
  end
end

local oldest = oldest_bucket()
if oldest and oldest ~= bucket_start_ms then
  return reply('BUCKET', oldest)
end

local is_given = {}
for index = FIRST_TARGET, #KEYS do
  is_given[KEYS[index]] = true
end

local shard = string.sub(buckets, 1, -#'buckets' - 1) -- what all keys of the shard begin with

local function target(kind, name)
  return shard .. kind .. ':' .. name
end

local function want(key)
  if not is_wanted[key] then
    is_wanted[key] = true
    wanted[#wanted + 1] = key
  end
end

-- include member
-- include limits
-- include route

local function due_page(set, first, limit, ...)
  return redis.call('ZRANGE', set, '-inf', text(now_ms), 'BYSCORE', 'LIMIT', first, math.min(PAGE, limit), ...)
end

local rows, row_count, plan, bytes, go_ms = {}, 0, {}, 0, {} -- rows for the screen, and the plan for elsewhere, in order

local function add_row(member, due_ms)
  rows[2 * row_count + 1], rows[2 * row_count + 2] = member, due_ms
  row_count = row_count + 1
end

-- include places
-- include turns

local count, is_cut = 0, false -- of the bucket
while oldest and turn_count + count < claim_limit and bytes < claim_bytes_max and not is_cut do
  local page = due_page(bucket, count, claim_limit - turn_count - count, 'WITHSCORES')
  if #page == 0 then
    break
  end
  for index = 1, #page, 2 do
    local member, due_ms, step = page[index], due_text(page[index + 1]), nil
    if not is_plain or string.byte(member, FORM_AT) == RESCHEDULED then
      step = route(member, due_ms, go_ms)
    end
    if not step or not step.kind then
      add_row(member, due_ms)
    elseif is_given[step.key] then
      plan[#plan + 1] = step
    else
      is_cut = true
      break
    end
    bytes, count = bytes + #member, count + 1
  end
end

-- Say what the messages behind this claim need, so that the next one can name it. A wrong guess costs another call.
if look_ahead and not is_cut and is_outbox_of_all then
  want(usual_target('default'))
elseif is_cut or (look_ahead and oldest and not is_plain) then
  local ahead_ms = {}
  for topic, ms in pairs(go_ms) do
    ahead_ms[topic] = ms
  end
  local ahead, ahead_bytes = 0, 0
  while ahead < claim_limit and ahead_bytes < claim_bytes_max do
    local page = due_page(bucket, count + ahead, claim_limit - ahead)
    if #page == 0 then
      break
    end
    for _, member in ipairs(page) do
      local topic = likely_topic(member) -- to decode it only once
      local key = topic and usual_target(topic)
      if key then
        want(key)
      else
        local step = route(member, due_text(redis.call('ZSCORE', bucket, member)), ahead_ms)
        if step.kind then
          want(step.key)
        end
      end
      ahead, ahead_bytes = ahead + 1, ahead_bytes + #member
    end
  end
end

-- Put messages that are not due in this bucket into their own ones, so that what is due elsewhere does not wait for them.
local function refile()
  local found = redis.call('ZRANGE', bucket, 0, PAGE - 1, 'WITHSCORES')
  for index = 1, #found, 2 do
    want(target('bucket', bucket_start(tonumber(found[index + 1]))))
  end
  for _, key in ipairs(wanted) do
    if not is_given[key] then
      return reply('TARGET', '')
    end
    redis.call('ZCARD', key) -- a key of another type ends the script before anything is written
  end
  for index = 1, #found, 2 do
    local start = bucket_start(tonumber(found[index + 1]))
    redis.call('ZADD', target('bucket', start), text(tonumber(found[index + 1])), found[index])
    redis.call('ZADD', buckets, start, start)
  end
  redis.call('ZREMRANGEBYRANK', bucket, 0, #found / 2 - 1)
  redis.call('HINCRBY', counters, 'misfiled', #found / 2)
  close_empty_bucket()
  return reply('BUCKET', oldest_bucket())
end

if turn_count + count == 0 then
  if is_cut then
    return reply('TARGET', '')
  end
  if is_misfiled() then
    return refile()
  end
  local head_ms = oldest and tonumber(redis.call('ZRANGE', bucket, 0, 0, 'WITHSCORES')[2])
  if oldest and not head_ms then
    close_empty_bucket()
    oldest = oldest_bucket()
    if oldest then
      return reply('BUCKET', oldest)
    end
  end
  note_turns()
  local turn_ms = has_held and tonumber(redis.call('ZRANGE', held_topics, 0, 0, 'WITHSCORES')[2])
  if head_ms or turn_ms then
    return reply('WAIT', text(math.max(now_ms, math.min(head_ms or TIME_MAX, turn_ms or TIME_MAX))))
  end
  return reply('EMPTY', '')
end

-- A key that holds something else ends the script here, before it has done anything that another try would do again.
local checked = {}
for _, step in ipairs(plan) do
  if not checked[step.key] then
    checked[step.key] = redis.call(step.kind == 'held' and 'ZCARD' or 'XLEN', step.key)
  end
end
redis.call('LLEN', claim)
if #plan > 0 then
  redis.call('SCARD', topics)
  redis.call('SCARD', dead_topics)
  redis.call('ZCARD', ids)
end

-- include move

-- First where the messages go to, then where they come from: an error between the two can repeat them, not lose them.
local found, is_found = {}, {}
for _, step in ipairs(plan) do
  move(step)
  if step.kind == 'held' then
    touched[step.name] = true
  end
  local topic = step.body and step.body.topic
  -- One whose key has something is in `topics` already; with thousands of topics, saying so again took 3 % of the time.
  if step.kind ~= 'outbox' and checked[step.key] == 0 and not is_found[topic] then
    found[#found + 1], is_found[topic] = topic, true
  end
end
for first = 1, #found, PAGE do
  redis.call('SADD', topics, unpack(found, first, math.min(first + PAGE - 1, #found)))
end
local lease_until_ms = text(now_ms + lease_ms)
if #rows > 0 then
  for first = 1, #rows, 2 * PAGE do
    redis.call('RPUSH', claim, unpack(rows, first, math.min(first + 2 * PAGE - 1, #rows)))
  end
  redis.call('ZADD', claims, lease_until_ms, lease_token)
end
if count > 0 then
  redis.call('ZREMRANGEBYRANK', bucket, 0, count - 1)
end
close_empty_bucket()
end_turns()
if has_ids then
  forget_over(ids, now_ms)
end
for name, number in pairs({delivered = delivered, dead = dead}) do
  if number > 0 then
    redis.call('HINCRBY', counters, name, number)
  end
end
if #rows == 0 then
  return reply('MOVED', '', nil, moved)
end
return reply('OK', lease_until_ms, rows, moved)
