#!lua
-- ARGV: version, step. A version is evaluated once, however often it is asked for.
local k = P .. 'evaluation:' .. ARGV[1]
if redis.call('EXISTS', k) == 0 then
  redis.call('HSET', k, 'step', ARGV[2])
  redis.call('ZADD', P .. 'evaluations:open', ARGV[1], ARGV[1])
end
return 1
