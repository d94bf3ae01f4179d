-- Take a topic out of those that have dead letters, if it has none any more. So who looks for dead letters looks at no other topic.
local function forget_if_none_dead(dead, dead_topics, topic)
  if redis.call('XLEN', dead) == 0 then
    redis.call('SREM', dead_topics, topic)
  end
end
