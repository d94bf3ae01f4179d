-- Store the messages with an idempotency key that is not known, a page at a time: a call for each took the server two to three times
-- as long.
local FIELDS, PAGE = 4, 1000 -- of a message, and messages a command: Lua hands over 8,000 values at most
local first_identified, duplicates = first_start + bucket_count, {}

-- Return what a key has for each of some ids; false for what is not there. A key that is not there is not asked.
local function lookup(command, key, names)
  return redis.call('EXISTS', key) == 1 and redis.call(command, key, unpack(names)) or {}
end

local function is_known(forget_ms)
  return forget_ms and now_ms < tonumber(forget_ms)
end

for first = first_identified, #arguments, FIELDS * PAGE do
  local last, names = math.min(first + FIELDS * PAGE, #arguments + 1) - FIELDS, {}
  for cursor = first, last, FIELDS do
    names[#names + 1] = arguments[cursor + 3]
  end
  local waiting, delivered, gone = lookup('HMGET', places, names), lookup('ZMSCORE', ids, names), lookup('ZMSCORE', cancelled, names)
  local new_places, new_members, is_taken = {}, {}, {}
  for index, name in ipairs(names) do
    local cursor = first + FIELDS * (index - 1)
    local bucket, due_ms, member = tonumber(arguments[cursor]), arguments[cursor + 1], arguments[cursor + 2]
    if waiting[index] or is_taken[name] or is_known(delivered[index]) or is_known(gone[index]) then
      duplicates[#duplicates + 1] = (cursor - first_identified) / FIELDS
    else
      is_taken[name], is_new[member] = true, true
      new_places[#new_places + 1] = name
      new_places[#new_places + 1] = place_of(member, due_ms)
      local members = new_members[bucket] or {}
      members[#members + 1] = due_ms
      members[#members + 1] = member
      new_members[bucket] = members
      stored = stored + 1
    end
  end
  if #new_places > 0 then
    redis.call('HSET', places, unpack(new_places))
  end
  for bucket, members in pairs(new_members) do
    redis.call('ZADD', bucket_keys[bucket], unpack(members))
  end
end
