#!lua flags=allow-oom,no-writes
-- Everything that a verification compares, at one moment. It holds the server for about 5 ms per thousand prompts.
local total = counter('total')
local fields = {'state', 'token', 'ticket', 'holder', 'bytes', 'step', 'task', 'pass', 'row', 'reason'}
local prompts = {}
for prompt = 0, total - 1 do
  local known = redis.call('HMGET', prompt_key(text(prompt)), unpack(fields))
  if known[1] then
    local line = {text(prompt)}
    for i = 1, #fields do line[i + 1] = known[i] or '' end
    prompts[#prompts + 1] = line
  end
end
local pending, returned, held, orders = {}, {}, {}, {}
for _, task in ipairs(redis.call('SMEMBERS', P .. 'tasks')) do
  pending[#pending + 1] = {task, redis.call('ZRANGE', P .. 'pending:' .. task, 0, -1)}
  returned[#returned + 1] = {task, redis.call('ZRANGE', P .. 'returned:' .. task, 0, -1, 'WITHSCORES')}
end
for pass = 0, counter('passes') do orders[#orders + 1] = redis.call('STRLEN', P .. 'order:' .. text(pass)) end
local plans = {}
local first = tonumber(redis.call('HGET', COUNTERS, 'first_planned') or 1)
for step = first, counter('last_planned') do
  local plan = redis.call('HMGET', P .. 'plan:' .. text(step), 'prompts', 'state', 'through')
  plans[#plans + 1] = {text(step), plan[1] or '', plan[2] or '', plan[3] or ''}
end
local holders = {}
for _, line in ipairs(prompts) do holders[line[5]] = true end
for holder, _ in pairs(holders) do
  held[#held + 1] = {holder, redis.call('SMEMBERS', P .. 'held:' .. holder)}
end
local function flat(name) -- HGETALL is a map in some protocol versions, a list in others: always a list here
  local found, list = redis.call('HGETALL', P .. name), {}
  for i = 1, #found do list[i] = found[i] end
  return list
end
return {flat('counters'), flat('config'), flat('dropped'), prompts, pending, returned,
  redis.call('ZRANGE', LEASES, 0, -1), redis.call('ZRANGE', INPLAY, 0, -1, 'WITHSCORES'), plans, held, orders,
  flat('consumed')}
