-- A segment could not be tokenised, or its worker hands it back.
--
-- Arguments: service, group, mode ('final' | 'retry' | 'release'), id, ordinal, segment, media hash, failure (JSON),
-- attempts so far. final: dead letter and tombstone; retry and release: to the end of the stream, with the attempts
-- given.
-- Answers what was done: 'buried', 'requeued' or 'stale' (another worker has settled it).
local service, group, mode = take(), take(), take()
local id, ordinal, segment, media, failure = take(), take(), take(), take(), take()
local attempts = take()
local stream, record = work_key(service), sample_key(ordinal)
local entry = redis.call('XRANGE', stream, id, id)
local found = redis.call('HMGET', record, 'm' .. segment, 'k' .. segment, 'w' .. segment)
local wanted = found[1] == media and not found[2]
local answer = 'stale'
if wanted and mode == 'final' then
  local rest = redis.call('HMGET', record, 'head', 'at')
  forget(ordinal)
  bury(ordinal, rest[1], failure, rest[2])
  answer = 'buried'
elseif wanted and #entry > 0 and found[3] == service .. ' ' .. id then
  local fields = entry[1][2]
  for i = 1, #fields, 2 do
    if fields[i] == 'a' then fields[i + 1] = attempts end
  end
  local new = redis.call('XADD', stream, '*', unpack(fields))
  redis.call('HSET', record, 'w' .. segment, service .. ' ' .. new)
  if mode == 'retry' then count('retries', 1) end
  answer = 'requeued'
end
redis.pcall('XACK', stream, group, id)
redis.call('XDEL', stream, id)
return answer
