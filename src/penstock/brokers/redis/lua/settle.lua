-- Items of 6: class, entry, token, verb, deliveries, and the verb's argument: delay in ms for
-- retry, headers for dead.
local ordered = redis.call('HGET', base, 'ordered') == '1'
local gone = {high = {}, normal = {}, low = {}} -- no longer in flight
local done = {high = {}, normal = {}, low = {}} -- finished
local released, answers = {}, {}
fence(2, 6)
for i = 2, #ARGV, 6 do
  local c, id, verb, count, more =
    ARGV[i], ARGV[i + 1], ARGV[i + 3], tonumber(ARGV[i + 4]), ARGV[i + 5]
  local key = held(c, id, ARGV[i + 2])
  if not key then
    answers[#answers + 1] = '0'
  else
    answers[#answers + 1] = '1'
    out[c][id] = false
    table.insert(gone[c], id)
    if verb == 'retry' then
      redis.call('ZADD', part(g, c, 'due'), now + tonumber(more), id .. ' ' .. key)
      redis.call('HSET', part(g, c, 'n'), id, count)
    elseif verb == 'release' then
      if count > 1 then redis.call('HSET', part(g, c, 'n'), id, count - 1) end
      released[#released + 1] = {c, id, key}
    else
      if verb == 'dead' then
        local entry = redis.call('XRANGE', stream(c), id, id)[1]
        local m = message(id, entry and entry[2] or {})
        redis.call('XADD', base .. '.dead:normal', '*', 'id', m.id, 'key', m.key, 'body', m.body,
          'headers', more)
      end
      table.insert(done[c], id)
      if ordered then unlock(g, c, key) end
    end
  end
end
for i = #released, 1, -1 do -- backwards, each to the front: this restores their order
  local c, id, key = unpack(released[i])
  offer(g, c, key, {id}, true)
  if ordered then unlock(g, c, key) end
end
for _, c in ipairs(CLASSES) do
  each_thousand(gone[c], function(...)
    redis.call('XACK', stream(c), g, ...)
    redis.call('HDEL', part(g, c, 'out'), ...)
  end)
  each_thousand(done[c], function(...) redis.call('ZREM', part(g, c, 'live'), ...) end)
end

-- At most every 5 s: delete history that is older than the retention. Keep entries that any group,
-- also of another program, has not read or not settled.
local function older(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return tonumber(a_ms) < tonumber(b_ms) and a or b end
  return tonumber(a_seq) < tonumber(b_seq) and a or b
end

local function trim(at, keep)
  for _, c in ipairs(CLASSES) do
    base = at
    local floor = string.format('%.0f-0', math.max(0, now - keep))
    for _, group in ipairs(groups(c)) do
      floor = older(floor, group['last-delivered-id'])
      if group.pending > 0 then
        floor = older(floor, redis.call('XPENDING', stream(c), group.name)[2])
      end
      local oldest = redis.call('ZRANGE', part(group.name, c, 'live'), 0, 0, 'WITHSCORES')
      if oldest[2] then floor = older(floor, string.format('%.0f-0', oldest[2])) end
      -- Delete consumers of ended workers: no entry in flight, and idle for more than 1 h.
      for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', stream(c), group.name)) do
        if row[4] == 0 and row[6] > 3600000 then
          redis.call('XGROUP', 'DELCONSUMER', stream(c), group.name, row[2])
        end
      end
    end
    if redis.call('EXISTS', stream(c)) == 1 then
      redis.call('XTRIM', stream(c), 'MINID', '~', floor)
    end
  end
end
local told = redis.call('HMGET', base, 'trimmed', 'retention')
local keep = tonumber(told[2] or '86400000')
if now - tonumber(told[1] or '0') >= math.min(5000, keep) then
  redis.call('HSET', base, 'trimmed', now)
  local home = base
  trim(home, keep)
  trim(home .. '.dead', tonumber(redis.call('HGET', home .. '.dead', 'retention') or '604800000'))
end
return table.concat(answers)
