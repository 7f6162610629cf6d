#!lua flags=allow-oom
-- ARGV: prompt, token, ... Answers the new deadline, then the tokens whose lease was extended.
local deadline = text(now_ms() + config('lease_ms'))
local answer = {deadline}
for i = 1, #ARGV, 2 do
  if holds(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, deadline, ARGV[i])
    answer[#answer + 1] = ARGV[i + 1]
  end
end
return answer
