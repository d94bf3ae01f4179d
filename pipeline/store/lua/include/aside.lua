-- A check at the beginning of a MULTI decides whether the plain commands behind it may do what they do. If not, each key that they write
-- to is set aside, and a string in its place refuses each ZADD and HSET, until the script at the end of the MULTI puts it back. Nobody
-- sees it meanwhile. `keys` has `count` of them from `first` on, and then where each is meanwhile.

-- Let the commands be done.
local function let_be(keys, first, count)
  redis.call('SET', keys[first + count], 'checked')
end

-- Have the commands refused.
local function set_aside(keys, first, count)
  for index = first, first + count - 1 do
    if redis.call('EXISTS', keys[index]) == 1 then
      redis.call('RENAME', keys[index], keys[index + count])
    end
    redis.call('SET', keys[index], 'aside')
  end
end

-- Return whether they were let be; if not, also because nothing was checked, put back what was set aside.
local function were_let_be(keys, first, count)
  if redis.pcall('GET', keys[first + count]) == 'checked' then
    redis.call('DEL', keys[first + count])
    return true
  end
  for index = first, first + count - 1 do
    if redis.pcall('GET', keys[index]) == 'aside' then
      redis.call('DEL', keys[index])
      if redis.call('EXISTS', keys[index + count]) == 1 then
        redis.call('RENAME', keys[index + count], keys[index])
      end
    end
  end
  return false
end
