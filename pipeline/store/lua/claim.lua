#!lua flags=allow-oom
-- Take the oldest due messages out of one bucket, each to where its topic goes: those for the screen in flight, under a lease; the
-- others into the stream of their topic, where their schedule ends in the same moment. Asking again with the same token gives the same
-- messages, so a lost reply costs nothing. allow-oom: a server that is full must still be able to get rid of messages.
--
-- A route says where the messages of a topic go, and the messages of a topic that come again for one group: its name is <topic> or
-- <topic>:<group>. A message whose route the caller did not name ends the call: the caller asks again and names it, too.
--
-- KEYS[1] buckets   ZSET    bucket_start_ms of every bucket that is not empty
-- KEYS[2] bucket    ZSET    member -> due_ms; the bucket that the caller takes for the oldest
-- KEYS[3] claims    ZSET    lease token -> lease_until_ms
-- KEYS[4] claim     LIST    member, due_ms, … of this token
-- KEYS[5] attempts  HASH    message_id -> claims that ended without acknowledgement
-- KEYS[6] pauses    HASH    topic -> epoch ms since when it is paused
-- KEYS[7] ids       ZSET    caller's id -> epoch ms at which it is forgotten
-- KEYS[8] counters  HASH
-- KEYS[9] paces     HASH    topic -> epoch ms at which its next message may go
-- KEYS[10] topics   SET     topics that have a stream, dead letters or held messages
-- KEYS[11..] stream STREAM  of each route; then dead STREAM of each; then held ZSET of each; then bucket ZSET of each later bucket
-- ARGV[1] bucket_start_ms  int     of KEYS[2]
-- ARGV[2] lease_token      string
-- ARGV[3] claim_limit      int     messages, at most
-- ARGV[4] claim_bytes_max  int     bytes of members after which the claim is full
-- ARGV[5] lease_ms         int
-- ARGV[6] id_memory_ms     int     how long a caller's id is known after its message was delivered
-- ARGV[7] now_ms           int     "" means the server's clock; tests pass their own
-- ARGV[8] all_to_screen    int     1: no topic has a setting of its own, so that nobody needs to look for it
-- ARGV[9] routes           int     number of routes
-- then for each route: name, 1 if it goes into a stream, expire_ms (0: never), interval_ms between its messages (0: none)
-- then for each later bucket: bucket_start_ms
-- Returns {status, now_ms, first lease_until_ms of all claims or "", detail, rows, attempts, moved}
--   OK      rows are member, due_ms, …; attempts are one number a message, or empty if all are 0; detail is lease_until_ms
--   MOVED   nothing for the screen, but something was due: ask again
--   ROUTE   nothing was done; detail is the route to name
--   LATER   nothing was done; detail is the bucket_start_ms of a later bucket to name
--   WAIT    nothing is due; detail is the next due_ms
--   BUCKET  another bucket is the oldest; detail is its bucket_start_ms: ask again for that one
--   EMPTY   nothing is scheduled; detail is ""
-- moved is route, {due_ms, …}, … of what went into streams
local buckets, bucket, claims, claim, attempts, pauses = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local ids, counters, paces, topics = KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local bucket_start_ms, lease_token = ARGV[1], ARGV[2]
local claim_limit, claim_bytes_max, lease_ms = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local id_memory_ms, now_ms, all_to_screen, route_count = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8] == '1', tonumber(ARGV[9])
if not now_ms then
  local time = redis.call('TIME')
  now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local BUCKET_WIDTH_MS = 600000 -- as in core/buckets.py
local PAGE = 100 -- messages a step, so that claim_bytes_max is passed by one page at most
local MESSAGE_ID_LENGTH = 22
local FORM_AT = MESSAGE_ID_LENGTH + 1
local RESCHEDULED = string.byte('r')
local BURST_MS = 100 -- of what its pace allows in so long, a topic's messages may go at once
local NAME_LENGTH_MAX = 64
local FORGET_LIMIT = 1000
local TIME_MAX = 2 ^ 53 -- a ZADD by hand may hold any score; beyond this no time is exact

local function text(number)
  return string.format('%.0f', math.min(math.max(number, -TIME_MAX), TIME_MAX))
end

local function due_text(score)
  -- The usual score stands as it is: writing each of 500 anew took a quarter of the script's time.
  return #score < 16 and string.find(score, '^%d+$') and score or text(tonumber(score))
end

local function tries_before(member)
  return redis.call('HGET', attempts, string.sub(member, 1, MESSAGE_ID_LENGTH)) or '0'
end

local is_tried = redis.call('EXISTS', attempts) == 1

local function reply(status, detail, rows, moved)
  local first_lease = redis.call('ZRANGE', claims, 0, 0, 'WITHSCORES')[2]
  local tried = {}
  if rows and is_tried then
    for index = 1, #rows, 2 do
      tried[#tried + 1] = tries_before(rows[index])
    end
  end
  return {status, text(now_ms), first_lease and text(tonumber(first_lease)) or '', detail, rows or {}, tried, moved or {}}
end

local held_until = redis.call('ZSCORE', claims, lease_token)
if held_until then
  return reply('OK', text(tonumber(held_until)), redis.call('LRANGE', claim, 0, -1))
end

local oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
if not oldest then
  return reply('EMPTY', '')
end
if oldest ~= bucket_start_ms then
  return reply('BUCKET', oldest)
end

local routes, later_buckets = {}, {}
for index = 1, route_count do
  local at = 9 + 4 * (index - 1)
  local stream = 10 + index
  routes[ARGV[at + 1]] = {
    name = ARGV[at + 1], streams = ARGV[at + 2] == '1', expire_ms = tonumber(ARGV[at + 3]), interval_ms = tonumber(ARGV[at + 4]),
    stream = KEYS[stream], dead = KEYS[stream + route_count], held = KEYS[stream + 2 * route_count],
  }
end
for index = 10 + 4 * route_count, #ARGV do
  later_buckets[ARGV[index]] = KEYS[index + 1 - route_count]
end

local function is_name(value)
  return type(value) == 'string' and #value <= NAME_LENGTH_MAX and string.find(value, '^[%w._-]+$')
end

local function number_of(value)
  local number = tonumber(value)
  return number == number and number or nil -- "nan" is a number to Lua
end

local function are_texts(headers)
  if type(headers) ~= 'table' then
    return false
  end
  for name, value in pairs(headers) do
    if type(name) ~= 'string' or type(value) ~= 'string' then
      return false
    end
  end
  return true
end

-- What a member says, with the names of the JSON form; one that is not of our format is a message as it stands.
local function read(member)
  local form, rest = string.sub(member, FORM_AT, FORM_AT), string.sub(member, FORM_AT + 1)
  if form == 'm' then
    return {topic = 'default', message = rest}
  end
  local is_json, body = pcall(cjson.decode, rest)
  if (form == 'j' or form == 'r') and is_json and type(body) == 'table' and type(body.message) == 'string' then
    local again = form == 'r' and body or {}
    local due_ms, attempt, group = number_of(again.due_ms), number_of(again.attempt or 1), again.group
    local has_texts = type(body.id or '') == 'string' and are_texts(body.headers or {})
    if has_texts and is_name(body.topic or 'default') and (not group or is_name(group)) and (due_ms and attempt or form == 'j') then
      return {
        topic = body.topic or 'default', message = body.message, id = body.id, headers = body.headers,
        group = group, due_ms = due_ms and text(due_ms), attempt = again.attempt and text(attempt),
      }
    end
  end
  return {topic = 'default', message = member}
end

local has_pauses = redis.call('EXISTS', pauses) == 1
local byte = string.byte
local is_plain = all_to_screen and not has_pauses -- then only what comes again for a group goes elsewhere
local next_ms = {} -- topic -> when its next message may go
local plan = {} -- of what does not go to the screen, in order
local rows, row_count, count, bytes, need, detail = {}, 0, 0, 0, nil, nil

local function show(member, due_ms)
  rows[2 * row_count + 1], rows[2 * row_count + 2] = member, due_ms
  row_count = row_count + 1
end

-- Decide where a message goes, before anything is written. False: the caller has to name something first.
local function decide(member, due_ms)
  local body = read(member)
  local name = body.group and body.topic .. ':' .. body.group or body.topic
  local route = routes[name]
  if not route then
    need, detail = 'ROUTE', name
    return false
  end
  local step = {member = member, body = body, route = route, due_ms = body.due_ms or due_ms}
  if has_pauses and redis.call('HEXISTS', pauses, body.topic) == 1 then
    step.key, step.score = route.held, due_ms
  elseif route.expire_ms > 0 and now_ms - tonumber(step.due_ms) > route.expire_ms then
    step.key, step.is_dead = route.dead, true
  elseif route.interval_ms > 0 and not body.due_ms then
    local go_ms = math.max(next_ms[body.topic] or tonumber(redis.call('HGET', paces, body.topic) or '0'), now_ms)
    if go_ms > now_ms + BURST_MS then
      local later_ms = math.ceil(go_ms - BURST_MS) -- when a newcomer with its place could go: so none overtakes it
      step.start = text(later_ms - later_ms % BUCKET_WIDTH_MS)
      step.key, step.score = later_buckets[step.start], text(later_ms)
      if not step.key then
        need, detail = 'LATER', step.start
        return false
      end
    end
    next_ms[body.topic] = go_ms + route.interval_ms
  end
  if not step.key and not route.streams then
    show(member, due_ms)
    return true
  end
  step.key = step.key or route.stream
  plan[#plan + 1] = step
  return true
end

while count < claim_limit and bytes < claim_bytes_max and not need do
  local page = redis.call('ZRANGE', bucket, '-inf', text(now_ms), 'BYSCORE',
    'LIMIT', count, math.min(PAGE, claim_limit - count), 'WITHSCORES')
  if #page == 0 then
    break
  end
  for index = 1, #page, 2 do
    local member, due_ms = page[index], due_text(page[index + 1])
    if is_plain and byte(member, FORM_AT) ~= RESCHEDULED then -- as show does, without the call: this is the usual way
      rows[2 * row_count + 1], rows[2 * row_count + 2] = member, due_ms
      row_count = row_count + 1
    elseif not decide(member, due_ms) then
      break
    end
    bytes, count = bytes + #member, count + 1
  end
end

if count == 0 then
  if need then
    return reply(need, detail)
  end
  local head = redis.call('ZRANGE', bucket, 0, 0, 'WITHSCORES')
  if head[2] then
    return reply('WAIT', text(tonumber(head[2])))
  end
  redis.call('ZREM', buckets, bucket_start_ms)
  oldest = redis.call('ZRANGE', buckets, 0, 0)[1]
  return reply(oldest and 'BUCKET' or 'EMPTY', oldest or '')
end

-- A key that holds something else ends the script here, before it has done anything that another try would do again.
local checked = {}
for _, step in ipairs(plan) do
  if not checked[step.key] then
    checked[step.key] = redis.call(step.score and 'ZCARD' or 'XLEN', step.key)
  end
end
redis.call('LLEN', claim)

local function id_of(member, body)
  return body.id or string.sub(member, 1, MESSAGE_ID_LENGTH)
end

local moved, dues, has_ids = {}, {}, false

local function count_moved(name, due_ms)
  if not dues[name] then
    dues[name] = {}
    moved[#moved + 1], moved[#moved + 2] = name, dues[name]
  end
  dues[name][#dues[name] + 1] = due_ms
end

-- The message leaves the schedule for good.
local function write_entry(step)
  local member, body = step.member, step.body
  local attempt = body.attempt or (is_tried and text(tries_before(member) + 1)) or '1'
  local fields = {
    'id', id_of(member, body), 'message', body.message, 'topic', body.topic, 'due_ms', step.due_ms, 'attempt', attempt,
  }
  if body.headers and next(body.headers) then
    fields[#fields + 1], fields[#fields + 2] = 'headers', cjson.encode(body.headers)
  end
  if step.is_dead then
    for _, word in ipairs({'reason', 'expired', 'group', body.group or '', 'died_ms', text(now_ms)}) do
      fields[#fields + 1] = word
    end
  end
  redis.call('XADD', step.key, '*', unpack(fields))
  if is_tried then
    redis.call('HDEL', attempts, string.sub(member, 1, MESSAGE_ID_LENGTH))
  end
  if body.id and not body.group then
    redis.call('ZADD', ids, 'XX', text(now_ms + id_memory_ms), body.id)
    has_ids = true
  end
end

-- First where the messages go to, then where they come from: an error between the two can repeat them, not lose them.
local dead, found = 0, {}
for _, step in ipairs(plan) do
  local member, body = step.member, step.body
  if step.start then
    local later = {message = body.message, topic = body.topic, id = id_of(member, body), headers = body.headers, due_ms = step.due_ms}
    redis.call('ZADD', step.key, step.score, string.sub(member, 1, MESSAGE_ID_LENGTH) .. 'r' .. cjson.encode(later))
    redis.call('ZADD', buckets, step.start, step.start)
  elseif step.score then
    redis.call('ZADD', step.key, step.score, member)
  elseif step.is_dead then
    write_entry(step)
    dead = dead + 1
  else
    write_entry(step)
    count_moved(step.route.name, step.due_ms)
  end
  if not found[body.topic] then
    found[body.topic] = redis.call('SADD', topics, body.topic)
  end
end
for topic, go_ms in pairs(next_ms) do
  redis.call('HSET', paces, topic, string.format('%.3f', go_ms))
end
local lease_until_ms = text(now_ms + lease_ms)
if #rows > 0 then
  for first = 1, #rows, 2 * PAGE do
    redis.call('RPUSH', claim, unpack(rows, first, math.min(first + 2 * PAGE - 1, #rows)))
  end
  redis.call('ZADD', claims, lease_until_ms, lease_token)
end
redis.call('ZREMRANGEBYRANK', bucket, 0, count - 1) -- the lowest scores are the lowest ranks
if redis.call('EXISTS', bucket) == 0 then
  redis.call('ZREM', buckets, bucket_start_ms)
end
if has_ids then
  local forgotten = redis.call('ZRANGE', ids, '-inf', text(now_ms), 'BYSCORE', 'LIMIT', 0, FORGET_LIMIT)
  if #forgotten > 0 then
    redis.call('ZREM', ids, unpack(forgotten))
  end
end
local delivered = 0
for index = 2, #moved, 2 do
  delivered = delivered + #moved[index]
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
