#!lua flags=allow-oom
-- ARGV: step, fence. The planned groups of a step are trained; answers {'ok', prompt, token, ...} whose payloads may go.
local refusal = fence_refusal(ARGV[2])
if refusal then return refusal end
local step, plan_key = tonumber(ARGV[1]), P .. 'plan:' .. ARGV[1]
local plan = redis.call('HMGET', plan_key, 'prompts', 'state')
if not plan[1] then return {'no_plan'} end
local first = counter('first_planned')
local last = tonumber(redis.call('HGET', COUNTERS, 'last_trained') or first - 1)
if plan[2] ~= 'trained' and step ~= last + 1 then return {'order', text(last)} end
local answer, now = {'ok'}, text(now_ms())
for prompt in string.gmatch(plan[1], '%d+') do
  local k = prompt_key(prompt)
  local known = redis.call('HMGET', k, 'state', 'token', 'bytes')
  if known[1] == 'planned' then
    move(prompt, 'planned', 'trained')
    count('stored', -tonumber(known[3]))
    redis.call('HSET', k, 'trained_at', now)
  end
  answer[#answer + 1] = prompt
  answer[#answer + 1] = known[2]
end
if plan[2] ~= 'trained' then
  redis.call('HSET', plan_key, 'state', 'trained')
  redis.call('HSET', COUNTERS, 'last_trained', ARGV[1])
end
return answer
