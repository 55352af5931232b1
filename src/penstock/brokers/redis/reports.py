"""The Lua for looking at topics of the Redis broker, and for what people do to them: figures, peek,
purge, replay. The names are told in redis_scripts.
"""

from __future__ import annotations

from penstock.brokers.redis.scripts import COMMON
from penstock.stores.redis import Script

STATS = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + """
-- ARGV: group. Returns ready, delayed, in flight, dead, ms of the oldest or -1, exact 0|1.
local g, known = ARGV[1], {}
for _, c in ipairs(CLASSES) do for _, group in ipairs(groups(c)) do if group.name == g then known[c] = group end end end
local ready, delayed, flying, oldest, exact = 0, 0, 0, -1, 1
local dead = redis.call('XLEN', base .. '.dead:normal')
if known.high and known.normal and known.low then
  if sort(g, 'penstock', 1000, nil) then -- what is delayed is only known once it was read
    for _, c in ipairs(CLASSES) do
      for _, group in ipairs(groups(c)) do if group.name == g then ready = ready + (group.lag or 0) end end
    end
    exact = 0
  end
  for _, c in ipairs(CLASSES) do
    local late = redis.call('ZCARD', part(g, c, 'due'))
    ready, delayed, flying = ready + waiting(g, c) - late, delayed + late, flying + redis.call('HLEN', part(g, c, 'out'))
    local first = redis.call('ZRANGE', part(g, c, 'live'), 0, 0, 'WITHSCORES')
    if first[2] and (oldest < 0 or tonumber(first[2]) < oldest) then oldest = tonumber(first[2]) end
  end
end
return {ready, delayed, flying, dead, oldest < 0 and -1 or now - oldest, exact}
"""
)

PEEK = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + """
-- ARGV: limit. Returns 6 values for each that waits for some group: class, entry, id, key, headers, body, ms it is due or 0.
local limit, answer = tonumber(ARGV[1]), {}
for _, c in ipairs(CLASSES) do
  local all, from, found, seen = groups(c), '-', 0, 0
  if #all > 0 then -- not through all of history
    local floor = now
    for _, group in ipairs(all) do
      local oldest = redis.call('ZRANGE', part(group.name, c, 'live'), 0, 0, 'WITHSCORES')
      floor = math.min(floor, tonumber(oldest[2] or floor), born(group['last-delivered-id']))
    end
    from = string.format('%.0f-0', floor)
  end
  if redis.call('EXISTS', stream(c)) == 1 then
    repeat
      local entries = redis.call('XRANGE', stream(c), from, '+', 'COUNT', 200)
      for _, entry in ipairs(entries) do
        local id, wait, due = entry[1], #all == 0, 0
        local m = message(id, entry[2])
        for _, group in ipairs(all) do
          local g = group.name
          if redis.call('ZSCORE', part(g, c, 'live'), id) then
            if redis.call('HEXISTS', part(g, c, 'out'), id) == 0 then
              wait = true
              due = math.max(due, tonumber(redis.call('ZSCORE', part(g, c, 'due'), id .. ' ' .. m.key) or '0'))
            end
          else
            local ms, seq = string.match(id, '^(%d+)-(%d+)$')
            local last_ms, last_seq = string.match(group['last-delivered-id'], '^(%d+)-(%d+)$')
            ms, seq, last_ms, last_seq = tonumber(ms), tonumber(seq), tonumber(last_ms), tonumber(last_seq)
            if ms > last_ms or (ms == last_ms and seq > last_seq) then wait = true; due = math.max(due, m.at or 0) end
          end
        end
        if wait and found < limit then
          found = found + 1
          for _, v in ipairs({RANK[c], id, m.id, m.key, m.headers, m.body, due}) do answer[#answer + 1] = v end
        end
        from = '(' .. id
      end
      seen = seen + #entries
    until #entries < 200 or found >= limit or seen >= 5000
  end
end
return answer
"""
)

PURGE = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + """
-- A bounded part of the work; called until the first value is 1. Returns done, then group and removed by turns.
local answer, removed, left = {1}, {}, 0
local ordered = redis.call('HGET', base, 'ordered') == '1'
local all = groups('normal')
local function drop(g, c, ids)
  each_thousand(ids, function(...)
    redis.call('ZREM', part(g, c, 'live'), ...)
    redis.call('HDEL', part(g, c, 'n'), ...)
  end)
  removed[g] = (removed[g] or 0) + #ids
end
for _, group in ipairs(all) do
  local g = group.name
  if sort(g, 'penstock', 1000, nil) then left = 1 end
  for _, c in ipairs(CLASSES) do
    local late = redis.call('ZPOPMIN', part(g, c, 'due'), 500)
    local ids = {}
    for i = 1, #late, 2 do
      local id, key = string.match(late[i], '^(%S+) (.*)$')
      ids[#ids + 1] = id
      if ordered then unlock(g, c, key) end
    end
    drop(g, c, ids)
    for _, key in ipairs(redis.call('ZRANGE', part(g, c, 'keys'), 0, redis.call('HLEN', part(g, c, 'out')) + 50)) do
      drop(g, c, redis.call('LPOP', part(g, c, 'k:' .. key), 500) or {})
      if redis.call('ZSCORE', part(g, c, 'keys'), key) ~= 'inf' and redis.call('EXISTS', part(g, c, 'k:' .. key)) == 0 then
        redis.call('ZREM', part(g, c, 'keys'), key)
      end
    end
    if waiting(g, c) > 0 then left = 1 end
  end
end
if left == 0 then -- and history with it
  for _, c in ipairs(CLASSES) do
    if redis.call('EXISTS', stream(c)) == 1 then
      local floor
      for _, group in ipairs(groups(c)) do
        local oldest = redis.call('ZRANGE', part(group.name, c, 'live'), 0, 0, 'WITHSCORES')
        if oldest[2] and (not floor or tonumber(oldest[2]) < floor) then floor = tonumber(oldest[2]) end
      end
      if #all == 0 then removed[''] = (removed[''] or 0) + redis.call('XLEN', stream(c)) end
      if floor then redis.call('XTRIM', stream(c), 'MINID', '=', string.format('%.0f-0', floor)) else redis.call('XTRIM', stream(c), 'MAXLEN', 0) end
    end
  end
end
answer[1] = 1 - left
for g, n in pairs(removed) do answer[#answer + 1] = g; answer[#answer + 1] = n end
return answer
"""
)

REPLAY = Script(
    "#!lua\n"
    + COMMON
    + """
-- ARGV: group, class, entry to start from. A bounded part of the work: returns how many were added, and where to go on or ''.
local g, c = ARGV[1], ARGV[2]
local upto
for _, group in ipairs(groups(c)) do if group.name == g then upto = group['last-delivered-id'] end end
if not upto then -- a group that is new: nothing of what is there already, but for what is asked for here
  for _, name in ipairs(CLASSES) do redis.pcall('XGROUP', 'CREATE', stream(name), g, '$', 'MKSTREAM') end
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
"""
)
