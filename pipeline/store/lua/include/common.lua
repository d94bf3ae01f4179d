local MESSAGE_ID_LENGTH = 22 -- as in core/ids.py
local BUCKET_WIDTH_MS = 600000 -- as in core/buckets.py
local TIME_MAX = 2 ^ 53 -- a ZADD by hand may hold any score; beyond this no time is exact

-- Return a number as a decimal integer, where tostring would write 1e+15.
local function text(number)
  return string.format('%.0f', math.min(math.max(number, -TIME_MAX), TIME_MAX))
end

-- Return epoch ms: the time that a test gives, else the server's.
local function clock_ms(argument)
  if argument ~= '' then
    return tonumber(argument)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Return the start of the bucket that a time belongs to.
local function bucket_start(due_ms)
  local time = math.min(math.max(due_ms, -TIME_MAX), TIME_MAX)
  return text(math.floor(time / BUCKET_WIDTH_MS) * BUCKET_WIDTH_MS)
end
