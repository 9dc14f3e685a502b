-- The trainer's position; trims what a checkpoint covers.
--
-- Arguments: consumed, covered (ordinals), trainer, most records to trim in this call.
-- Answers {records trimmed, records left, '1' while a checkpoint is asked for}.
local consumed, covered, trainer, most = take(), take(), take(), tonumber(take())
local before = tonumber(redis.call('HGET', key('position'), 'covered') or '-1')
redis.call('HSET', key('position'), 'consumed', consumed, 'covered', covered, 'trainer', trainer, 'at', now_ms())
local old = redis.call('ZRANGEBYSCORE', key('open'), '-inf', '(' .. covered, 'LIMIT', 0, most)
for _, ordinal in ipairs(old) do forget(ordinal) end
-- Without an earlier position nothing has been committed yet: the wish stays.
if before >= 0 and tonumber(covered) > before then redis.call('HDEL', key('control'), 'checkpoint') end
return { #old, redis.call('ZCARD', key('open')), redis.call('HGET', key('control'), 'checkpoint') or '0' }
