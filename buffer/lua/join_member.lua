#!lua
-- ARGV: name, role, pool, info. Answers the incarnation; what an earlier process of the name had proved is forgotten.
local incarnation = redis.call('HINCRBY', P .. 'incarnations', ARGV[1], 1)
local k = P .. 'member:' .. ARGV[1]
redis.call('DEL', k)
redis.call('HSET', k, 'role', ARGV[2], 'pool', ARGV[3], 'info', ARGV[4], 'state', 'joining', 'version', '-1',
  'incarnation', text(incarnation), 'seen', text(now_ms()))
redis.call('SADD', P .. 'members', ARGV[1])
return incarnation
