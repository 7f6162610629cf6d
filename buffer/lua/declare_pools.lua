#!lua
-- ARGV: pool, replicas, most, ... of every pool of the spec. Whoever spoke last counts: a number of replicas that people
-- set stays until the spec's own number is another than at the last declaration. Nobody is draining: no replica runs yet.
local named = {}
for i = 1, #ARGV, 3 do
  local name, replicas, most = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  named[name] = true
  if redis.call('HGET', P .. 'pools:spec', name) ~= replicas then
    redis.call('HSET', P .. 'pools:spec', name, replicas)
    redis.call('HSET', P .. 'pools:replicas', name, replicas)
  end
  redis.call('HSET', P .. 'pools:most', name, most)
  if tonumber(redis.call('HGET', P .. 'pools:replicas', name)) > tonumber(most) then
    redis.call('HSET', P .. 'pools:replicas', name, most)
  end
end
for _, name in ipairs(redis.call('HKEYS', P .. 'pools:replicas')) do
  if not named[name] then
    for _, of in ipairs({'spec', 'replicas', 'most'}) do redis.call('HDEL', P .. 'pools:' .. of, name) end
  end
end
redis.call('DEL', P .. 'pools:draining')
return 'ok'
