#!lua flags=allow-oom
-- Take, keep or leave the turn of an ordered group: the one consumer that has it reads, the others stand by.
--
-- KEYS[1] active  STRING  the consumer that has the turn; it expires with the lease
-- ARGV[1] consumer  string
-- ARGV[2] lease_ms  int     0: leave it
-- Returns 1 if the consumer has the turn now, else 0
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
