#!lua
-- Adds one chunk of a pass. ARGV: pass, rows of a pass, offset of the chunk, opener, rows (int32s), index of each row's
-- task (int32s, from 1), names of tasks...
local pass, rows, offset, opener = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local opened, limit = counter('passes'), config('passes')
local known = tonumber(redis.call('HGET', COUNTERS, 'rows') or rows)
if known ~= rows then return {'rows', text(known)} end
if pass < opened then
  return {'open', redis.call('HGET', P .. 'openers', ARGV[1]) or ''}
end
if pass > opened then return {'early', text(opened)} end
if limit > 0 and pass >= limit then return {'limit', text(limit)} end
redis.call('HSET', COUNTERS, 'rows', text(rows))

local order = P .. 'order:' .. ARGV[1]
if offset ~= redis.call('STRLEN', order) / 4 then return {'ok'} end -- this chunk is in: a retry, or another opener
redis.call('APPEND', order, ARGV[5])
local length = #ARGV[5] / 4
local first = pass * rows + offset
local by_task, flush = {}, nil
flush = function(task)
  if by_task[task] and #by_task[task] > 0 then
    redis.call('ZADD', P .. 'pending:' .. ARGV[6 + task], unpack(by_task[task]))
    by_task[task] = {}
  end
end
for i = 0, length - 1 do
  local task = struct.unpack('<i4', ARGV[6], i * 4 + 1)
  local pairs_of = by_task[task] or {}
  by_task[task] = pairs_of
  pairs_of[#pairs_of + 1] = text(first + i)
  pairs_of[#pairs_of + 1] = text(first + i)
  if #pairs_of >= 2000 then flush(task) end
end
for task, _ in pairs(by_task) do
  flush(task)
  redis.call('SADD', P .. 'tasks', ARGV[6 + task])
end
count('pending', length)
count('total', length)
if offset + length >= rows then
  redis.call('HSET', P .. 'openers', ARGV[1], opener)
  count('passes', 1)
end
return {'ok'}
