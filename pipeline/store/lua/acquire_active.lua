#!lua flags=allow-oom
-- Become, stay or stop being the active consumer of an ordered group: it alone reads, the others stand by.
--
-- KEYS[1] active  STRING  the active consumer; it expires with the lease
-- ARGV[1] consumer  string
-- ARGV[2] lease_ms  int     0: stop being active
-- Returns 1 if the consumer is active now, else 0
local active = KEYS[1]
local consumer, lease_ms = ARGV[1], tonumber(ARGV[2])

local holder = redis.call('GET', active)
if holder and holder ~= consumer then
  return 0
end
if lease_ms == 0 then
  redis.call('DEL', active)
  return 0
end
redis.call('SET', active, consumer, 'PX', lease_ms)
return 1
