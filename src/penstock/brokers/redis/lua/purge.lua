-- Does a bounded part of the work. Called until the first value is 1.
-- Returns done, then for each group its name and the number of removed entries.
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
    for _, key in ipairs(redis.call('ZRANGE', part(g, c, 'keys'), 0,
      redis.call('HLEN', part(g, c, 'out')) + 50)) do
      drop(g, c, redis.call('LPOP', part(g, c, 'k:' .. key), 500) or {})
      if redis.call('ZSCORE', part(g, c, 'keys'), key) ~= 'inf'
        and redis.call('EXISTS', part(g, c, 'k:' .. key)) == 0 then
        redis.call('ZREM', part(g, c, 'keys'), key)
      end
    end
    if waiting(g, c) > 0 then left = 1 end
  end
end
if left == 0 then -- delete the history too
  for _, c in ipairs(CLASSES) do
    if redis.call('EXISTS', stream(c)) == 1 then
      local floor
      for _, group in ipairs(groups(c)) do
        local oldest = redis.call('ZRANGE', part(group.name, c, 'live'), 0, 0, 'WITHSCORES')
        if oldest[2] and (not floor or tonumber(oldest[2]) < floor) then
          floor = tonumber(oldest[2])
        end
      end
      if #all == 0 then removed[''] = (removed[''] or 0) + redis.call('XLEN', stream(c)) end
      if floor then
        redis.call('XTRIM', stream(c), 'MINID', '=', string.format('%.0f-0', floor))
      else
        redis.call('XTRIM', stream(c), 'MAXLEN', 0)
      end
    end
  end
end
answer[1] = 1 - left
for g, n in pairs(removed) do answer[#answer + 1] = g; answer[#answer + 1] = n end
return answer
