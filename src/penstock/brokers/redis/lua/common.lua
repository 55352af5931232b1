local base = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local micros = time[1] * 1000000 + time[2]
local CLASSES = {'high', 'normal', 'low'}
local RANK = {high = 0, normal = 1, low = 2}

local function stream(c) return base .. ':' .. c end
local function part(g, c, what) return base .. ':' .. g .. ':' .. c .. ':' .. what end
local function born(id) return tonumber(string.match(id, '^%d+')) end

-- unpack() has a limit, batches do not.
local function each_thousand(list, work)
  for i = 1, #list, 1000 do work(unpack(list, i, math.min(i + 999, #list))) end
end

local function groups(c)
  local found = {}
  if redis.call('EXISTS', stream(c)) == 1 then
    for _, row in ipairs(redis.call('XINFO', 'GROUPS', stream(c))) do
      local g = {}
      for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
      found[#found + 1] = g
    end
  end
  return found
end

-- The first groups of a topic get all existing entries. A later group gets entries that are
-- published after its creation. It may replay older ones.
local function create(g)
  local start = '0'
  for _, c in ipairs(CLASSES) do if #groups(c) > 0 then start = '$' end end
  for _, c in ipairs(CLASSES) do
    redis.pcall('XGROUP', 'CREATE', stream(c), g, start, 'MKSTREAM')
  end
end

-- Other programs may XADD entries in another format. They are delivered too, and a worker that
-- cannot read them settles them as dead.
local function message(id, fields)
  -- nearly all entries
  if fields[1] == 'id' and fields[3] == 'key' and fields[5] == 'body' and not fields[7] then
    return {entry = id, id = fields[2], key = fields[4], headers = '', body = fields[6]}
  end
  local m = {}
  for i = 1, #fields, 2 do m[fields[i]] = fields[i + 1] end
  return {
    entry = id, id = m.id or id, key = m.key or '', headers = m.headers or '',
    body = m.body or fields[2] or '', at = tonumber(m.at or '')
  }
end

local function offer(g, c, key, ids, first)
  local list = part(g, c, 'k:' .. key)
  each_thousand(ids, function(...) redis.call(first and 'LPUSH' or 'RPUSH', list, ...) end)
  -- After the waiting keys: otherwise a stream of new keys would starve them.
  redis.call('ZADD', part(g, c, 'keys'), 'NX', micros, key)
end

local function unlock(g, c, key)
  if redis.call('EXISTS', part(g, c, 'k:' .. key)) == 1 then
    redis.call('ZADD', part(g, c, 'keys'), micros, key)
  else
    redis.call('ZREM', part(g, c, 'keys'), key)
  end
end

-- Reads up to `count` new entries of each class and sorts them by key.
-- Returns true if there may be more.
local function sort(g, owner, count, fresh)
  local names, starts = {}, {}
  for i, c in ipairs(CLASSES) do names[i], starts[i] = stream(c), '>' end
  local args = {
    'GROUP', g, owner, 'COUNT', count, 'NOACK',
    'STREAMS', names[1], names[2], names[3], '>', '>', '>'
  }
  local got = redis.pcall('XREADGROUP', unpack(args))
  if got and got.err then
    if not string.find(got.err, 'NOGROUP') then return got end
    create(g)
    got = redis.call('XREADGROUP', unpack(args))
  end
  local more = false
  for _, one in ipairs(got or {}) do
    local c = string.sub(one[1], #base + 2)
    local live, lists, order, due = {}, {}, {}, {}
    for _, entry in ipairs(one[2]) do
      local m = message(entry[1], entry[2])
      live[#live + 1] = born(m.entry)
      live[#live + 1] = m.entry
      if fresh then fresh[c .. m.entry] = m end
      if m.at and m.at > now then
        due[#due + 1] = m.at
        due[#due + 1] = m.entry .. ' ' .. m.key
      else
        if not lists[m.key] then lists[m.key] = {}; order[#order + 1] = m.key end
        table.insert(lists[m.key], m.entry)
      end
    end
    each_thousand(live, function(...) redis.call('ZADD', part(g, c, 'live'), ...) end)
    each_thousand(due, function(...) redis.call('ZADD', part(g, c, 'due'), ...) end)
    for _, key in ipairs(order) do offer(g, c, key, lists[key]) end
    if #one[2] == count then more = true end
  end
  return more
end

local function waiting(g, c)
  return redis.call('ZCARD', part(g, c, 'live')) - redis.call('HLEN', part(g, c, 'out'))
end
