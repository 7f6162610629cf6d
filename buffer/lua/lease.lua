#!lua
-- ARGV: member, count, version, request, tasks... (none: all). Answers {refusal, detail, prompt, ticket, token, row,
-- pass, task, deadline, ...}. The answer is kept for as long as its leases live, so that a repeated request gets it again.
local member, wanted, version, request = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local answer_key = P .. 'answer:' .. request
local before = redis.call('LRANGE', answer_key, 0, -1)
if #before > 0 then return before end

local now = now_ms()
take_back_expired(now)

local flags = redis.call('HMGET', P .. 'control', 'stop', 'pause')
if flags[1] and flags[1] ~= '' then return {'stopping', 'the run is stopping (' .. flags[1] .. '): no new leases'} end
if flags[2] and flags[2] ~= '' then return {'paused', 'the run is paused: no new leases until it goes on'} end
local current = current_version()
if current < 0 then return {'no_version', 'no version is published yet: waiting for the consumer'} end
local known = redis.call('HMGET', P .. 'member:' .. member, 'state', 'version', 'incarnation')
if known[1] == 'quarantined' then
  return {'quarantined', member .. ' is quarantined: the proof of its weights failed'}
end
if known[1] ~= 'serving' then
  return {'not_proved', member .. ' is ' .. (known[1] or 'not registered') .. ', only a serving member may lease'}
end
if tonumber(known[2]) ~= version then
  return {'not_proved', member .. ' asks with version ' .. version .. ', what it has proved is version ' .. known[2]}
end

local tasks = {}
for i = 5, #ARGV do tasks[#tasks + 1] = ARGV[i] end
if #tasks == 0 then tasks = redis.call('SMEMBERS', P .. 'tasks') end

-- The lowest entry over all wanted tasks.
local function lowest(kind)
  local best, best_score, best_task
  for _, task in ipairs(tasks) do
    local entry = redis.call('ZRANGE', P .. kind .. task, 0, 0, 'WITHSCORES')
    if entry[1] and (not best or tonumber(entry[2]) < best_score) then
      best, best_score, best_task = entry[1], tonumber(entry[2]), task
    end
  end
  return best, best_task
end

local per_step, budget, reserve = config('groups_per_step'), config('budget_bytes'), config('reserve_bytes')
local allowed = consumed_at(version) + (config('max_staleness') + 1) * per_step
local deadline = now + config('lease_ms')
local answer, refusal, detail = {}, '', ''
local taken = 0

while taken < wanted do
  local accepted, running, returned = counter('accepted'), counter('leased'), counter('returned')
  local again, task = lowest('returned:')
  -- New prompts leave room for every returned one: those are older, and the step that is due waits for them.
  local free = allowed - accepted - running
  if not again then free = free - returned end
  if free <= 0 then
    refusal = 'staleness'
    detail = text(accepted + running + returned) .. ' groups are accepted, running or due again; ' .. text(allowed) ..
      ' are allowed at version ' .. version .. ' (max_staleness ' .. text(config('max_staleness')) .. ', ' ..
      text(per_step) .. ' groups per step)'
    break
  end
  local prompt = again
  if not prompt then
    local bytes = counter('stored') + counter('reserved') + (returned + 1) * reserve
    prompt, task = lowest('pending:')
    if prompt and bytes > budget then
      refusal = 'budget'
      detail = text(counter('stored')) .. ' bytes are stored, ' .. text(counter('reserved')) .. ' reserved, ' ..
        text(reserve) .. ' more are needed; the budget is ' .. text(budget) .. ' bytes'
      break
    end
  end
  if not prompt then
    local passes = config('passes')
    if counter('pending') > 0 then
      refusal, detail = 'exhausted', 'no prompt of the tasks that ' .. member .. ' answers is pending'
    elseif passes > 0 and counter('passes') >= passes then
      refusal, detail = 'exhausted', 'every prompt of all ' .. text(passes) .. ' passes was leased'
    else
      refusal, detail = 'no_pass', 'every prompt was leased: pass ' .. text(counter('passes')) .. ' is not open yet'
    end
    break
  end

  local k = prompt_key(prompt)
  local ticket, pass, row
  if again then
    redis.call('ZREM', P .. 'returned:' .. task, prompt)
    count('returned', -1)
    local kept = redis.call('HMGET', k, 'ticket', 'pass', 'row')
    ticket, pass, row = kept[1], kept[2], kept[3]
  else
    redis.call('ZREM', P .. 'pending:' .. task, prompt)
    ticket = text(count('tickets', 1))
    local rows = counter('rows')
    pass = text(math.floor(tonumber(prompt) / rows))
    local place = (tonumber(prompt) % rows) * 4
    row = text(struct.unpack('<i4', redis.call('GETRANGE', P .. 'order:' .. pass, place, place + 3)))
    redis.call('ZADD', INPLAY, ticket, prompt)
  end
  local token = text(count('tokens', 1))
  redis.call('HSET', k, 'row', row, 'pass', pass, 'task', task, 'ticket', ticket, 'token', token, 'holder', member,
    'leased_at', text(now), 'leased_version', text(version))
  redis.call('HINCRBY', k, 'attempts', 1)
  move(prompt, 'pending', 'leased')
  count('reserved', reserve)
  redis.call('ZADD', LEASES, text(deadline), prompt)
  redis.call('SADD', P .. 'held:' .. member, prompt)
  for _, value in ipairs({prompt, ticket, token, row, pass, task, text(deadline)}) do answer[#answer + 1] = value end
  taken = taken + 1
end

if taken == 0 then return {refusal, detail} end
redis.call('HSETNX', P .. 'first_leases', member .. ' ' .. (known[3] or '0'), text(now))
redis.call('RPUSH', answer_key, '', '', unpack(answer))
redis.call('PEXPIRE', answer_key, text(config('lease_ms')))
return redis.call('LRANGE', answer_key, 0, -1)
