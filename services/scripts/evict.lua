-- Shrinks the cache to `limit` bytes, as far as nothing still wanted stands in the way.
--
-- Arguments: limit in bytes. Answers {spans evicted, bytes left}.
local evicted = evict(tonumber(take()), now_ms())
return { evicted, tonumber(redis.call('GET', cache .. ':bytes') or '0') }
