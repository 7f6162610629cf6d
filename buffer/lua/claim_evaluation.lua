#!lua
-- ARGV: member, version, milliseconds. Answers {version, step} of the oldest request that can be claimed, or {}.
local now = now_ms()
for _, asked in ipairs(redis.call('ZRANGEBYSCORE', P .. 'evaluations:open', '-inf', ARGV[2])) do
  local claim = redis.call('HMGET', P .. 'evaluation:' .. asked, 'step', 'member', 'deadline')
  if not claim[2] or claim[2] == ARGV[1] or tonumber(claim[3]) < now then
    redis.call('HSET', P .. 'evaluation:' .. asked, 'member', ARGV[1], 'deadline', text(now + tonumber(ARGV[3])))
    return {asked, claim[1]}
  end
end
return {}
