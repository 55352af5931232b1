-- ARGV: group. Returns ready, delayed, in flight, dead, ms of the oldest or -1, exact 0|1.
local g, known = ARGV[1], {}
for _, c in ipairs(CLASSES) do
  for _, group in ipairs(groups(c)) do if group.name == g then known[c] = group end end
end
local ready, delayed, flying, oldest, exact = 0, 0, 0, -1, 1
local dead = redis.call('XLEN', base .. '.dead:normal')
if known.high and known.normal and known.low then
  if sort(g, 'penstock', 1000, nil) then -- unread entries remain, and some may be delayed
    for _, c in ipairs(CLASSES) do
      for _, group in ipairs(groups(c)) do
        if group.name == g then ready = ready + (group.lag or 0) end
      end
    end
    exact = 0
  end
  for _, c in ipairs(CLASSES) do
    local late = redis.call('ZCARD', part(g, c, 'due'))
    ready, delayed, flying = ready + waiting(g, c) - late, delayed + late,
      flying + redis.call('HLEN', part(g, c, 'out'))
    local first = redis.call('ZRANGE', part(g, c, 'live'), 0, 0, 'WITHSCORES')
    if first[2] and (oldest < 0 or tonumber(first[2]) < oldest) then oldest = tonumber(first[2]) end
  end
end
return {ready, delayed, flying, dead, oldest < 0 and -1 or now - oldest, exact}
