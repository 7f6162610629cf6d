#!lua flags=allow-oom
-- A leased prompt ends as generated or dropped. ARGV: prompt, token, state, reason, bytes, usable fields (name, value)...
-- Answers {'done'}, {'again', state} when this token ended it before, {'fenced', why}.
local prompt, token, to, reason, bytes = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local k = prompt_key(prompt)
local found = redis.call('HMGET', k, 'state', 'token', 'holder')
if found[2] == token and found[1] ~= 'leased' and found[1] ~= 'pending' then return {'again', found[1]} end
if found[1] ~= 'leased' or found[2] ~= token then
  return {'fenced', 'prompt ' .. prompt .. ' is ' .. (found[1] or 'pending') ..
    (found[1] == 'leased' and (' by ' .. found[3] .. ' with token ' .. found[2]) or '') .. ', not leased with token ' .. token}
end
end_lease(prompt, found[3])
move(prompt, 'leased', to)
redis.call('HSET', k, 'reason', reason, 'bytes', text(bytes), 'finished_at', text(now_ms()))
if #ARGV > 5 then redis.call('HSET', k, unpack(ARGV, 6)) end
if to == 'generated' then
  count('accepted', 1)
  count('stored', bytes)
else
  redis.call('ZREM', INPLAY, prompt)
  redis.call('HINCRBY', P .. 'dropped', reason, 1)
end
return {'done'}
