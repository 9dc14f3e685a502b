-- Stores spans and fills the segments they belong to; acknowledges and removes the work entries.
--
-- Arguments: service, group, limit of the cache in bytes, number of entries; per entry: id, ordinal, segment,
-- media hash, cache key, span ('' = it is in the cache already).
-- Answers the number of samples published, then the 0-based places of entries whose span was promised to be in the
-- cache and is not; those stay with the worker.
local service, group, limit, entries = take(), take(), tonumber(take()), tonumber(take())
local at = now_ms()
local answer, published, done = { 0 }, 0, 0
for i = 0, entries - 1 do
  local id, ordinal, segment, media, cache_key, span = take(), take(), take(), take(), take(), take()
  if span == '' and redis.call('EXISTS', span_key(cache_key)) == 0 then
    answer[#answer + 1] = i
  else
    if span ~= '' then store(cache_key, span, at) else touch(cache_key, at) end
    if fill(ordinal, segment, media, cache_key) then published = published + 1 end
    redis.pcall('XACK', work_key(service), group, id)
    redis.call('XDEL', work_key(service), id)
    done = done + 1
  end
end
evict(limit, at)
count('completed', done)
answer[1] = published
return answer
