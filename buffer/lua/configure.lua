#!lua
-- ARGV: name, value, ... ; the first caller writes them, a later one with other values gets the first that differs.
if redis.call('EXISTS', CONFIG) == 0 then
  redis.call('HSET', CONFIG, unpack(ARGV))
  return {'ok'}
end
for i = 1, #ARGV, 2 do
  local known = redis.call('HGET', CONFIG, ARGV[i]) or ''
  if known ~= ARGV[i + 1] then return {'differs', ARGV[i], known, ARGV[i + 1]} end
end
return {'ok'}
