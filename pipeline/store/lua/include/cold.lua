local HOUR_MS, COLD_HOUR_MAX, COLD_PLACE_LENGTH = 3600000, 2 ^ 20 - 1, 17 -- as in core/cold.py

-- Return the hour since the epoch that a cold message counts for.
local function hour_of(due_ms)
  return text(math.min(math.floor(tonumber(due_ms) / HOUR_MS), COLD_HOUR_MAX))
end

-- Return that hour of a message that waits in a cold file: the first 20 bits of its place. Of any other place nil.
local function hour_of_cold(place)
  if #place == COLD_PLACE_LENGTH then
    local first, second, third = string.byte(place, 1, 3)
    return text(first * 4096 + second * 16 + math.floor(third / 16))
  end
end

-- Count cold messages that are due in an hour; an hour of which none is left is forgotten.
local function count_cold(cold, hour, change)
  if redis.call('HINCRBY', cold, hour, change) <= 0 then
    redis.call('HDEL', cold, hour)
  end
end
