local FORM_AT = MESSAGE_ID_LENGTH + 1 -- where a member has the letter of its form
local PLAIN, JSON, RESCHEDULED = string.byte('mjr', 1, 3) -- the letters
local NAME_LENGTH_MAX = 64
local NOTHING = {} -- one for all: making a table costs more than most that is done here

local function is_name(value)
  return type(value) == 'string' and #value <= NAME_LENGTH_MAX and string.find(value, '^[%w._-]+$')
end

local function number_of(value)
  local number = tonumber(value)
  return number == number and number or nil -- "nan" is a number to Lua
end

local function are_strings(headers)
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

-- 14 characters of a token and 8 hex digits, as in core/messages.py. The messages of a file have their token in common.
local TOKEN_LENGTH, TOKEN = 14, '^' .. string.rep('[-0-9A-Z_a-z]', 14)
local last_token

local function has_message_id(member)
  local token = string.sub(member, 1, TOKEN_LENGTH)
  if token ~= last_token then
    if not string.find(token, TOKEN) then
      return false
    end
    last_token = token
  end
  local _, last_digit = string.find(member, '^[0-9a-f]+', TOKEN_LENGTH + 1)
  return last_digit and last_digit >= MESSAGE_ID_LENGTH
end

-- Return what a member says, with the names of the JSON form; one that is not of our format is a message as it stands.
local function read_member(member)
  local form, rest = has_message_id(member) and string.sub(member, FORM_AT, FORM_AT), string.sub(member, FORM_AT + 1)
  if form == 'm' then
    return {topic = 'default', message = rest}
  end
  local is_json, body = pcall(cjson.decode, rest)
  if (form == 'j' or form == 'r') and is_json and type(body) == 'table' and type(body.message) == 'string' then
    local rescheduled = form == 'r' and body or NOTHING
    local due_ms, attempt, group = number_of(rescheduled.due_ms), number_of(rescheduled.attempt or 1), rescheduled.group
    local has_strings = type(body.id or '') == 'string' and (not body.headers or are_strings(body.headers))
    if has_strings and is_name(body.topic or 'default') and (not group or is_name(group)) and (due_ms and attempt or form == 'j') then
      body.topic, body.group = body.topic or 'default', group
      body.due_ms, body.attempt = due_ms and text(due_ms), rescheduled.attempt and text(attempt)
      return body
    end
  end
  return {topic = 'default', message = member}
end

-- Return the topic of a member that is not rescheduled, without reading it: nil if that does not tell it. A header may have its name.
local function likely_topic(member)
  local form = string.byte(member, FORM_AT)
  if form == PLAIN then
    return 'default'
  end
  return form == JSON and string.match(member, '"topic":"([%w._-]+)"', FORM_AT)
end
