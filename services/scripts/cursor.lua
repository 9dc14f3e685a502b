-- Where ingest goes on.
--
-- Arguments: mode, ordinal. checkpoint: the trainer is asked for one; open: the cursor as it is, or `ordinal` where there is none; again: back to what the
-- trainer asked for, if it did; skip: forward to `ordinal`. Answers the cursor.
local mode, ordinal = take(), take()
local cursor = redis.call('HGET', key('ingest'), 'cursor')
local wanted = cursor
if mode == 'checkpoint' then
  redis.call('HSET', key('control'), 'checkpoint', '1')
elseif mode == 'open' then
  wanted = cursor or ordinal
elseif mode == 'again' then
  local wish = redis.call('HGET', key('control'), 'again_from')
  if wish and (not cursor or tonumber(wish) < tonumber(cursor)) then wanted = wish end
  redis.call('HDEL', key('control'), 'again_from')
elseif mode == 'skip' and (not cursor or tonumber(ordinal) > tonumber(cursor)) then
  wanted = ordinal
end
if wanted and wanted ~= cursor then redis.call('HSET', key('ingest'), 'cursor', wanted) end
return wanted or '-1'
