#!lua flags=allow-oom
-- ARGV: member. What it has claimed and not done may be claimed by others at once; answers how many requests that are.
local number = 0
for _, asked in ipairs(redis.call('ZRANGE', P .. 'evaluations:open', 0, -1)) do
  if redis.call('HGET', P .. 'evaluation:' .. asked, 'member') == ARGV[1] then
    redis.call('HDEL', P .. 'evaluation:' .. asked, 'member', 'deadline')
    number = number + 1
  end
end
return number
