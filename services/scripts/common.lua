-- Shared by all scripts. ARGV[1] = run, ARGV[2] = prefix of the cache's keys.
--
-- {run}:sample:{ordinal}  a sample under assembly: n, left, head, at, and per segment m{i} (media hash) with
--                         either k{i} (cache key of its span) or w{i} ("service entry-id", still to be done);
--                         once published only id (entry in {run}:tokens) and at.
-- {run}:open              sorted set of the ordinals that have such a record.
-- ordinal = epoch * corpus length + position: one dense count over all epochs.
local run, cache = ARGV[1], ARGV[2]
local next_argument = 3

local function take()
  local value = ARGV[next_argument]
  next_argument = next_argument + 1
  return value
end

local function key(name) return run .. ':' .. name end
local function sample_key(ordinal) return run .. ':sample:' .. ordinal end
local function work_key(service) return run .. ':work:' .. service end
local function span_key(name) return cache .. ':' .. name end
local function count(name, by) redis.call('HINCRBY', key('counters'), name, by) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function mark_published(ordinal, id, at)
  redis.call('DEL', sample_key(ordinal))
  redis.call('HSET', sample_key(ordinal), 'id', id, 'at', at)
  redis.call('ZADD', key('open'), ordinal, ordinal)
  count('published', 1)
end

local function publish(ordinal, head, references, at)
  local id = redis.call('XADD', key('tokens'), '*', 'o', ordinal, 'h', head, 'k', table.concat(references, ' '))
  mark_published(ordinal, id, at)
end

-- The sample can't be had: an entry without spans keeps the order dense, a dead letter tells why.
local function bury(ordinal, head, failure, at)
  local id = redis.call('XADD', key('tokens'), '*', 'o', ordinal, 'h', head, 'f', failure)
  mark_published(ordinal, id, at)
  redis.call('XADD', key('dead'), 'MAXLEN', '~', 10000, '*', 'o', ordinal, 'h', head, 'f', failure)
  count('tombstones', 1)
end

-- Fills segment i of a sample and publishes it when it was the last one. Filling twice, or filling a sample that
-- is published, trimmed or about other media, changes nothing.
local function fill(ordinal, i, media_hash, cache_key)
  local record = sample_key(ordinal)
  local found = redis.call('HMGET', record, 'm' .. i, 'k' .. i)
  if not found[1] or found[1] ~= media_hash or found[2] then return false end
  redis.call('HSET', record, 'k' .. i, cache_key)
  redis.call('HDEL', record, 'w' .. i)
  if redis.call('HINCRBY', record, 'left', -1) > 0 then return false end
  local rest = redis.call('HMGET', record, 'n', 'head', 'at')
  local references = {}
  for j = 0, tonumber(rest[1]) - 1 do references[j + 1] = redis.call('HGET', record, 'k' .. j) end
  publish(ordinal, rest[2], references, rest[3])
  return true
end

local function touch(cache_key, at) redis.call('ZADD', cache .. ':lru', at, cache_key) end

local function store(cache_key, span, at)
  if redis.call('SET', span_key(cache_key), span, 'NX') then
    redis.call('INCRBY', cache .. ':bytes', #span)
  end
  touch(cache_key, at)
end

local function entry_exists(stream, id) return #redis.call('XRANGE', stream, id, id) > 0 end

-- What has become of a sample: 'absent', 'pending', 'published', or 'broken' (its record names entries or spans
-- that have vanished).
local function state_of(ordinal)
  local record = redis.call('HGETALL', sample_key(ordinal))
  if #record == 0 then return 'absent' end
  local fields = {}
  for i = 1, #record, 2 do fields[record[i]] = record[i + 1] end
  if fields['id'] then
    local entry = redis.call('XRANGE', key('tokens'), fields['id'], fields['id'])
    if #entry == 0 then return 'broken' end
    local values = entry[1][2]
    for i = 1, #values, 2 do
      if values[i] == 'k' then
        for name in string.gmatch(values[i + 1], '%S+') do
          if redis.call('EXISTS', span_key(name)) == 0 then return 'broken' end
        end
      end
    end
    return 'published'
  end
  for i = 0, tonumber(fields['n']) - 1 do
    if fields['k' .. i] then
      if redis.call('EXISTS', span_key(fields['k' .. i])) == 0 then return 'broken' end
    else
      local service, id = string.match(fields['w' .. i] or '', '^(%S+) (%S+)$')
      if not id or not entry_exists(work_key(service), id) then return 'broken' end
    end
  end
  return 'pending'
end

-- Removes all traces of a sample: its record, its published entry, its work still to be done.
local function forget(ordinal)
  local record = redis.call('HGETALL', sample_key(ordinal))
  for i = 1, #record, 2 do
    if record[i] == 'id' then
      redis.call('XDEL', key('tokens'), record[i + 1])
    elseif string.sub(record[i], 1, 1) == 'w' then
      local service, id = string.match(record[i + 1], '^(%S+) (%S+)$')
      if id then redis.call('XDEL', work_key(service), id) end
    end
  end
  redis.call('DEL', sample_key(ordinal))
  redis.call('ZREM', key('open'), ordinal)
end

-- Evicts the spans that were not touched for longest until the cache fits `limit`; spans that samples not yet
-- consumed may refer to are kept (those were touched since the next sample to consume was added).
local function evict(limit, at)
  local size = tonumber(redis.call('GET', cache .. ':bytes') or '0')
  if size <= limit then return 0 end
  local consumed = redis.call('HGET', key('position'), 'consumed') or '0'
  local next_open = redis.call('ZRANGEBYSCORE', key('open'), consumed, '+inf', 'LIMIT', 0, 1)[1]
  local guard = next_open and redis.call('HGET', sample_key(next_open), 'at') or string.format('%d', at + 1)
  local oldest = redis.call('ZRANGEBYSCORE', cache .. ':lru', '-inf', '(' .. guard, 'LIMIT', 0, 256)
  local evicted = 0
  for _, name in ipairs(oldest) do
    if size <= limit then break end
    local bytes = redis.call('STRLEN', span_key(name))
    redis.call('DEL', span_key(name))
    redis.call('ZREM', cache .. ':lru', name)
    size = redis.call('DECRBY', cache .. ':bytes', bytes)
    evicted = evicted + 1
  end
  if evicted > 0 then count('evicted', evicted) end
  return evicted
end
