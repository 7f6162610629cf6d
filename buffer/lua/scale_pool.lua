#!lua flags=allow-oom
-- ARGV: pool, replicas. Answers {'ok', replicas before}, {'unknown', pools...} or {'bounds', most}.
local before = redis.call('HGET', P .. 'pools:replicas', ARGV[1])
if not before then return {'unknown', unpack(redis.call('HKEYS', P .. 'pools:replicas'))} end
local replicas, most = tonumber(ARGV[2]), tonumber(redis.call('HGET', P .. 'pools:most', ARGV[1]))
if replicas < 0 or replicas > most then return {'bounds', text(most)} end
redis.call('HSET', P .. 'pools:replicas', ARGV[1], text(replicas))
return {'ok', before}
