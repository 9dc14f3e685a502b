-- Makes the consumer group of a work stream, and the stream, where they are missing.
--
-- Arguments: service, group. The group starts at the beginning: settled entries are deleted, so whatever the stream
-- holds is unsettled.
local service, group = take(), take()
redis.pcall('XGROUP', 'CREATE', work_key(service), group, '0', 'MKSTREAM')
return 1
