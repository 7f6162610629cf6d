#!lua flags=allow-oom
-- ARGV: step, fence, final. Answers {'plan', prompts, version, final, checkpoint}, {'waiting', missing, prompt, state,
-- holder, age in ms, ...}, {'no_data'} before any producer has come, or why there can be none.
local step, fence, final = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local refusal = fence_refusal(fence)
if refusal then return refusal end
local plan_key = P .. 'plan:' .. ARGV[1]
local written = redis.call('HMGET', plan_key, 'prompts', 'version', 'final', 'checkpoint')
if written[1] then return {'plan', unpack(written)} end
local last = tonumber(redis.call('HGET', COUNTERS, 'last_planned') or step - 1)
if step ~= last + 1 then return {'order', text(last)} end

local now = now_ms()
take_back_expired(now)
local per_step = config('groups_per_step')
if per_step == 0 then return {'no_data'} end -- no producer has come yet to say what the run's data are
local due = redis.call('ZRANGE', INPLAY, 0, per_step - 1)
local missing, waiting = per_step - #due, {}
for _, prompt in ipairs(due) do
  local known = redis.call('HMGET', prompt_key(prompt), 'state', 'holder', 'leased_at')
  if known[1] ~= 'generated' then
    missing = missing + 1
    if #waiting >= 64 then known = {} end -- enough to name
    for _, value in ipairs(known[1] and {prompt, known[1], known[2], text(now - tonumber(known[3]))} or {}) do
      waiting[#waiting + 1] = value
    end
  end
end
if #due < per_step and passes_used_up() and counter('leased') == 0 then return {'used_up', text(#due)} end
if missing > 0 then return {'waiting', text(missing), unpack(waiting)} end

local flags = redis.call('HMGET', P .. 'control', 'checkpoint', 'stop')
local checkpoint = (flags[1] and flags[1] ~= '') and '1' or '0'
redis.call('HDEL', P .. 'control', 'checkpoint')
if flags[2] and flags[2] ~= '' then final = '1' end
local through = counter('planned_groups') + #due
for place, prompt in ipairs(due) do
  move(prompt, 'generated', 'planned')
  redis.call('HSET', prompt_key(prompt), 'step', ARGV[1], 'place', text(place - 1))
end
redis.call('ZREM', INPLAY, unpack(due))
local prompts, version = table.concat(due, ' '), text(current_version())
redis.call('HSET', plan_key, 'prompts', prompts, 'version', version, 'final', final, 'checkpoint', checkpoint,
  'through', text(through), 'fence', fence, 'state', 'planned')
redis.call('HSET', COUNTERS, 'planned_groups', text(through), 'last_planned', ARGV[1])
redis.call('HSETNX', COUNTERS, 'first_planned', ARGV[1])
return {'plan', prompts, version, final, checkpoint}
