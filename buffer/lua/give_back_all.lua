#!lua flags=allow-oom
-- ARGV: member. Its tokens are void from now on, so what it still commits is fenced.
local held = redis.call('SMEMBERS', P .. 'held:' .. ARGV[1])
for _, prompt in ipairs(held) do send_back(prompt, 'its holder is gone') end
return #held
