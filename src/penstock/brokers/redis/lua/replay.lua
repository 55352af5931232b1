-- ARGV: group, class, entry to start from. Does a bounded part of the work.
-- Returns the number of added entries, and the entry to continue from or ''.
local g, c = ARGV[1], ARGV[2]
local upto
for _, group in ipairs(groups(c)) do
  if group.name == g then upto = group['last-delivered-id'] end
end
if not upto then -- a new group: of the existing entries it gets only the replayed ones
  for _, name in ipairs(CLASSES) do
    redis.pcall('XGROUP', 'CREATE', stream(name), g, '$', 'MKSTREAM')
  end
  upto = '+'
end
local entries, added = redis.call('XRANGE', stream(c), ARGV[3], upto, 'COUNT', 200), 0
for _, entry in ipairs(entries) do
  local id = entry[1]
  if redis.call('ZADD', part(g, c, 'live'), 'NX', born(id), id) == 1 then
    added = added + 1
    offer(g, c, message(id, entry[2]).key, {id})
  end
end
return {added, #entries == 200 and '(' .. entries[#entries][1] or ''}
