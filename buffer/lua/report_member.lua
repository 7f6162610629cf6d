#!lua flags=allow-oom
-- A heartbeat, a new state or a goodbye of the newest process of a name. ARGV: name, incarnation, 'report' or 'leave',
-- field, value, ... Answers {'ok'} or {'fenced', newest incarnation}.
local newest = redis.call('HGET', P .. 'incarnations', ARGV[1]) or '0'
if newest ~= ARGV[2] then return {'fenced', newest} end
local k = P .. 'member:' .. ARGV[1]
if ARGV[3] == 'leave' then
  redis.call('DEL', k)
  redis.call('SREM', P .. 'members', ARGV[1])
  return {'ok'}
end
redis.call('HSET', k, 'seen', text(now_ms()))
redis.call('SADD', P .. 'members', ARGV[1])
if #ARGV > 3 then redis.call('HSET', k, unpack(ARGV, 4)) end
return {'ok'}
