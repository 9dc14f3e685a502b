-- Registers samples and either publishes them (all spans cached) or adds what is missing to the work streams.
--
-- Arguments: expected cursor ('' = don't compare), new cursor ('' = raise it to the highest ordinal + 1), number
-- of samples; per sample: ordinal, head, failure ('' or why it can't be had), number of segments; per segment:
-- service, media hash, cache key ('' = unknown), payload ('' = thought to be cached).
-- Answers {'moved', cursor}: the cursor isn't the expected one, nothing was done;
--         {'payload', i, …}: nothing was done, the spans of the i-th segments (counted through) have vanished;
--         {'added', new, published at once, cached segments}.
local expected, new_cursor, samples = take(), take(), tonumber(take())
local cursor = redis.call('HGET', key('ingest'), 'cursor')
if expected ~= '' and expected ~= (cursor or '-1') then return { 'moved', cursor or '-1' } end

local batch, absent, counted = {}, { 'payload' }, 0
for s = 1, samples do
  local sample = { ordinal = take(), head = take(), failure = take(), segments = {} }
  for i = 1, tonumber(take()) do
    local segment = { service = take(), media = take(), span = take(), payload = take() }
    segment.cached = segment.span ~= '' and redis.call('EXISTS', span_key(segment.span)) == 1
    if segment.payload == '' and not segment.cached then absent[#absent + 1] = counted end
    counted = counted + 1
    sample.segments[i] = segment
  end
  batch[s] = sample
end
if #absent > 1 then return absent end

local covered = tonumber(redis.call('HGET', key('position'), 'covered') or '0')
local at = now_ms()
local new, published, hits, highest = 0, 0, 0, -1
for _, sample in ipairs(batch) do
  local ordinal = sample.ordinal
  highest = math.max(highest, tonumber(ordinal))
  local state = 'covered'
  if tonumber(ordinal) >= covered then state = state_of(ordinal) end
  if state == 'broken' then
    forget(ordinal)
    count('repaired', 1)
    state = 'absent'
  end
  if state == 'absent' then
    new = new + 1
    if sample.failure ~= '' then
      bury(ordinal, sample.head, sample.failure, at)
    else
      local left, fields, references = 0, {}, {}
      for i, segment in ipairs(sample.segments) do
        local index = i - 1
        fields[#fields + 1] = 'm' .. index
        fields[#fields + 1] = segment.media
        if segment.cached then
          touch(segment.span, at)
          hits = hits + 1
          references[i] = segment.span
          fields[#fields + 1] = 'k' .. index
          fields[#fields + 1] = segment.span
        else
          left = left + 1
          local id = redis.call('XADD', work_key(segment.service), '*', 'o', ordinal, 's', index,
            'm', segment.media, 'a', 0, 'b', segment.payload)
          fields[#fields + 1] = 'w' .. index
          fields[#fields + 1] = segment.service .. ' ' .. id
        end
      end
      if left == 0 then
        publish(ordinal, sample.head, references, at)
        published = published + 1
      else
        redis.call('HSET', sample_key(ordinal), 'n', #sample.segments, 'left', left, 'head', sample.head,
          'at', at)
        -- A few fields a call: a sample of very many segments would overflow the stack of unpack.
        for i = 1, #fields, 100 do
          redis.call('HSET', sample_key(ordinal), unpack(fields, i, math.min(i + 99, #fields)))
        end
        redis.call('ZADD', key('open'), ordinal, ordinal)
      end
    end
  end
end
if new_cursor ~= '' then
  redis.call('HSET', key('ingest'), 'cursor', new_cursor)
elseif highest >= tonumber(cursor or '-1') then
  redis.call('HSET', key('ingest'), 'cursor', string.format('%d', highest + 1))
end
count('added', new)
count('cached_segments', hits)
return { 'added', new, published, hits }
