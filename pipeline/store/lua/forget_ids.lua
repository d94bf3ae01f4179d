#!lua flags=allow-oom
-- Forget idempotency keys whose time is over, of messages that were delivered and of those that were cancelled.
--
-- KEYS[1] ids        ZSET  idempotency key -> epoch ms at which it is forgotten
-- KEYS[2] cancelled  ZSET  idempotency key or handle -> epoch ms at which it is forgotten
-- ARGV[1] limit   int  keys of each, at most 1,000
-- ARGV[2] now_ms  int  "" means the server's clock; tests pass their own
-- Returns how many were forgotten of the one of which there were more
--
-- include common
local limit, now_ms = tonumber(ARGV[1]), clock_ms(ARGV[2])

local most = 0
for _, key in ipairs(KEYS) do
  local over = redis.call('ZRANGE', key, '-inf', text(now_ms), 'BYSCORE', 'LIMIT', 0, limit)
  if #over > 0 then
    redis.call('ZREM', key, unpack(over))
    most = math.max(most, #over)
  end
end
return most
