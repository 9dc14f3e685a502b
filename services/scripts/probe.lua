-- The trainer misses a sample: is it under way? If it is lost, ingest is asked to go again from there.
--
-- Arguments: ordinal. Answers 'published', 'pending', 'not yet' (ingest has not come so far) or 'asked'.
local ordinal = take()
local state = state_of(ordinal)
if state == 'published' or state == 'pending' then return state end
local cursor = tonumber(redis.call('HGET', key('ingest'), 'cursor') or '-1')
if state == 'absent' and cursor <= tonumber(ordinal) then return 'not yet' end
local wish = redis.call('HGET', key('control'), 'again_from')
if not wish or tonumber(ordinal) < tonumber(wish) then
  redis.call('HSET', key('control'), 'again_from', ordinal)
end
return 'asked'
