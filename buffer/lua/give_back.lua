#!lua flags=allow-oom
-- ARGV: reason, prompt, token, ... Answers how many went back; what is no longer held stays as it is.
local number = 0
for i = 2, #ARGV, 2 do
  if holds(ARGV[i], ARGV[i + 1]) then
    send_back(ARGV[i], ARGV[1])
    number = number + 1
  end
end
return number
