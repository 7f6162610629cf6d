-- What every operation on the ledger shares: the names of its keys and the moves of a prompt between states.
-- KEYS[1] is the run's prefix `forebay:{run}:`; all keys made from it are in the slot of `{run}`.
--
-- counters   hash: pending, returned, leased, generated, planned, trained, dropped (prompts in each state; returned is
--            the part of pending that has a ticket), tickets, tokens, accepted, stored, reserved, passes, total, ...
-- config     hash: the run's fixed numbers
-- order:<p>  the rows of pass p, packed int32
-- pending:<task>   zset by prompt: never leased            returned:<task>  zset by ticket: leased before
-- leases     zset by deadline (ms)                         inplay           zset by ticket: has a ticket, not planned
-- held:<m>   set: prompts that member m holds              prompt:<n>       hash: a prompt since its first lease
-- first_leases  hash by `member incarnation`: when that process was first given a lease (ms)
local P = KEYS[1]
local COUNTERS, CONFIG, LEASES, INPLAY = P .. 'counters', P .. 'config', P .. 'leases', P .. 'inplay'

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function text(n) return string.format('%.0f', n) end

local function counter(name) return tonumber(redis.call('HGET', COUNTERS, name) or 0) end
local function count(name, by) return redis.call('HINCRBY', COUNTERS, name, text(by)) end
local function config(name) return tonumber(redis.call('HGET', CONFIG, name) or 0) end

local function prompt_key(prompt) return P .. 'prompt:' .. prompt end

local function move(prompt, from, to)
  count(from, -1)
  count(to, 1)
  redis.call('HSET', prompt_key(prompt), 'state', to)
end

-- The lease of a prompt ends, whatever the prompt becomes next.
local function end_lease(prompt, holder)
  redis.call('ZREM', LEASES, prompt)
  redis.call('SREM', P .. 'held:' .. holder, prompt)
  count('reserved', -config('reserve_bytes'))
end

-- A leased prompt goes back to pending; it keeps its ticket and its place in the order of consumption.
local function send_back(prompt, reason)
  local k = prompt_key(prompt)
  local held = redis.call('HMGET', k, 'holder', 'task', 'ticket')
  end_lease(prompt, held[1])
  move(prompt, 'leased', 'pending')
  count('returned', 1)
  redis.call('ZADD', P .. 'returned:' .. held[2], held[3], prompt)
  redis.call('HSET', k, 'last_return', held[1] .. ': ' .. reason)
end

-- Bounded, so that one call never pays for many.
local function take_back_expired(now)
  local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', '(' .. text(now), 'LIMIT', 0, 64)
  for _, prompt in ipairs(expired) do send_back(prompt, 'lease ran out') end
  return #expired
end

local function holds(prompt, token)
  local found = redis.call('HMGET', prompt_key(prompt), 'state', 'token')
  return found[1] == 'leased' and found[2] == token
end

local function current_version() return tonumber(redis.call('HGET', COUNTERS, 'version') or -1) end

-- Groups trained when a version was published. A version that is proved but not yet published counts as the current.
local function consumed_at(version)
  local current = current_version()
  if version > current then version = current end
  return tonumber(redis.call('HGET', P .. 'consumed', text(version)) or 0)
end

local function fence_refusal(fence)
  local newest = redis.call('HGET', COUNTERS, 'fence') or '0'
  if newest ~= fence then
    return {'fenced', 'publisher ' .. fence .. ' is no longer the newest: ' .. newest .. ' has taken over'}
  end
  return nil
end

-- Passes are all open and complete, and nothing is left to lease.
local function passes_used_up()
  local passes = config('passes')
  return passes > 0 and counter('passes') >= passes and counter('pending') == 0
end
