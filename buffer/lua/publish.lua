#!lua flags=allow-oom
-- ARGV: fence, step, request. The next version becomes current; a repeated request gets the same one.
local refusal = fence_refusal(ARGV[1])
if refusal then return refusal end
if redis.call('HGET', COUNTERS, 'publish_request') == ARGV[3] then return {'ok', text(current_version())} end
-- The step's own place in the order, not what is trained by now: while journalled steps are replayed, weights of an
-- early step must not allow what only the newest weights allow.
local consumed = redis.call('HGET', P .. 'plan:' .. ARGV[2], 'through')
if not consumed then
  local first = tonumber(redis.call('HGET', COUNTERS, 'first_planned') or tonumber(ARGV[2]) + 1)
  consumed = tonumber(ARGV[2]) < first and '0' or text(counter('planned_groups'))
end
local version = text(current_version() + 1)
redis.call('HSET', COUNTERS, 'version', version, 'publish_request', ARGV[3])
redis.call('HSET', P .. 'consumed', version, consumed)
redis.call('HSET', P .. 'versions', version,
  cjson.encode({step = ARGV[2], consumed = consumed, fence = ARGV[1], time_ms = text(now_ms())}))
return {'ok', version}
