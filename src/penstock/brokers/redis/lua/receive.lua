-- ARGV: group, owner, lease in ms, limit, per key, shares of high, normal, low.
-- Returns token, ms until the next call is useful, then 7 values for each entry.
local g, owner, lease, limit, per_key =
  ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local quota = {high = tonumber(ARGV[6]), normal = tonumber(ARGV[7]), low = tonumber(ARGV[8])}
local state = base .. ':' .. g
local ordered = redis.call('HGET', base, 'ordered') == '1'
if ordered then per_key = 1 end
local fresh, chosen, taken, total = {}, {high = {}, normal = {}, low = {}}, {}, 0

local function back(c, id, key, count)
  redis.call('HSET', part(g, c, 'n'), id, count)
  redis.call('HDEL', part(g, c, 'out'), id)
  redis.call('XACK', stream(c), g, id)
  offer(g, c, key, {id}, true)
  if ordered then unlock(g, c, key) end
end

local function key_of(c, id)
  local out = redis.call('HGET', part(g, c, 'out'), id)
  if out then return string.match(out, '^%d+ (.*)$') end
  local entry = redis.call('XRANGE', stream(c), id, id)[1]
  return entry and message(id, entry[2]).key
end

-- Makes entries with an expired lease ready again. A worker that extends its lease resets the idle
-- time, so an entry that is idle for a whole lease has expired.
local function sweep()
  for _, c in ipairs(CLASSES) do
    local cursor, found = '0-0', 0
    repeat
      local got = redis.call(
        'XAUTOCLAIM', stream(c), g, owner, lease, cursor, 'COUNT', 100, 'JUSTID')
      cursor = got[1]
      for _, id in ipairs(got[2]) do
        found = found + 1
        local pending = redis.call('XPENDING', stream(c), g, id, id, 1)[1]
        local key = key_of(c, id)
        if key then
          redis.call('ZADD', part(g, c, 'live'), born(id), id)
          back(c, id, key, pending and pending[4] or 1)
        else
          redis.call('XACK', stream(c), g, id)
        end
      end
      for _, id in ipairs(got[3] or {}) do -- entries that were deleted by hand
        redis.call('ZREM', part(g, c, 'live'), id)
        redis.call('HDEL', part(g, c, 'out'), id)
      end
    until cursor == '0-0' or found >= 500
  end
  -- Removing a consumer by hand removes its pending list. Make its entries ready again.
  for _, c in ipairs(CLASSES) do
    local out = part(g, c, 'out')
    if redis.call('HLEN', out) > redis.call('XPENDING', stream(c), g)[1] then
      for _, id in ipairs(redis.call('HKEYS', out)) do
        if #redis.call('XPENDING', stream(c), g, id, id, 1) == 0 then
          back(c, id, key_of(c, id), 1)
        end
      end
    end
  end
end

local function promote(c)
  local due = part(g, c, 'due')
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, 100)) do
    local id, key = string.match(member, '^(%S+) (.*)$')
    redis.call('ZREM', due, member)
    offer(g, c, key, {id}, true)
    -- Unlock the key only for an entry that was delivered before. An entry that was published with
    -- a delay must not unlock a key that has another entry in flight.
    if ordered and redis.call('HEXISTS', part(g, c, 'n'), id) == 1 then unlock(g, c, key) end
  end
end

-- Serves keys in rotation, by the time they were last served. The entries of a key stay in order.
local pick
function pick(c, places)
  local keys, served = part(g, c, 'keys'), 0
  for _ in pairs(taken) do served = served + 1 end
  local round, got, empty =
    redis.call('ZRANGEBYSCORE', keys, '-inf', micros, 'LIMIT', 0, places + served), 0, false
  local touched = round
  while #round > 0 and got < places do
    local share, again = math.max(1, math.floor((places - got) / #round)), {}
    for _, key in ipairs(round) do
      local n = math.min(share, per_key - (taken[key] or 0), places - got)
      if n > 0 then
        local ids = redis.call('LPOP', part(g, c, 'k:' .. key), n) or {}
        for _, id in ipairs(ids) do table.insert(chosen[c], {id, key}) end
        got = got + #ids
        if #ids > 0 then taken[key] = (taken[key] or 0) + #ids else empty = true end
        if #ids == n and taken[key] < per_key then again[#again + 1] = key end
      end
    end
    round = again
  end
  for _, key in ipairs(touched) do
    if ordered and taken[key] then redis.call('ZADD', keys, '+inf', key)
    elseif redis.call('EXISTS', part(g, c, 'k:' .. key)) == 0 then redis.call('ZREM', keys, key)
    elseif taken[key] then redis.call('ZADD', keys, micros, key) end
  end
  total = total + got
  -- Keys without entries (only held) used up places in the list above: pick again.
  if empty and got < places then pick(c, places - got) end
end

local told = redis.call('HMGET', state, 'swept', 'cap')
local swept, cap = tonumber(told[1] or '0'), tonumber(told[2] or '1000')
-- Read more than `limit`, so that many entries of one key do not hide other keys.
local ahead = math.min(math.max(100, 2 * limit), cap)
local more = sort(g, owner, ahead, fresh)
if type(more) == 'table' then return more end
local bytes, read = 0, 0
for _, m in pairs(fresh) do bytes, read = bytes + #m.body, read + 1 end
if read > 0 then -- read fewer large bodies in advance, because they use this script's memory
  local fit = math.min(1000, math.max(10, math.floor(read * 4194304 / (bytes + 1))))
  if fit < cap or (fit > cap and read >= cap) then redis.call('HSET', state, 'cap', fit) end
end
if now - swept >= lease / 8 or now < swept then
  redis.call('HSET', state, 'swept', now)
  sweep()
end
local first, rounds = true, 0
repeat
  for _, c in ipairs(CLASSES) do
    if first then promote(c) end
    if quota[c] > 0 then pick(c, math.min(quota[c], limit - total)) end
  end
  for _, c in ipairs(CLASSES) do if total < limit then pick(c, limit - total) end end
  first, rounds = false, rounds + 1
  -- All entries that were read belong to keys that are held or locked: read more.
  local again = total == 0 and more and rounds < 5
  if again then more = sort(g, owner, ahead, fresh) end
until not again

if total == 0 then -- return when the next entry may be ready
  local wait, last = more and 0 or 60000, {}
  for i, c in ipairs(CLASSES) do
    local due = redis.call('ZRANGE', part(g, c, 'due'), 0, 0, 'WITHSCORES')
    if due[2] then wait = math.min(wait, tonumber(due[2]) - now) end
    local key = redis.call('ZRANGE', part(g, c, 'keys'), 0, 0, 'WITHSCORES')
    if key[2] then
      wait = math.min(wait, key[2] == 'inf' and 100 or (tonumber(key[2]) - micros) / 1000)
    end
    for _, group in ipairs(groups(c)) do
      if group.name == g then last[i] = group['last-delivered-id'] end
    end
  end
  return {0, math.max(0, math.ceil(wait)), unpack(last)}
end

local token = redis.call('HINCRBY', state, 'token', 1)
local answer = {token, 0}
for _, c in ipairs(CLASSES) do
  local ids, plain, old, out = {}, {}, {}, {}
  for i, one in ipairs(chosen[c]) do
    ids[i] = one[1]
    out[#out + 1] = one[1]
    out[#out + 1] = token .. ' ' .. one[2]
  end
  local counts = {}
  if #ids > 0 and redis.call('EXISTS', part(g, c, 'n')) == 1 then
    for i = 1, #ids do counts[i] = redis.call('HGET', part(g, c, 'n'), ids[i]) end
  end
  local first_time, entries = {}, {}
  for i, id in ipairs(ids) do
    if counts[i] then
      local claimed = redis.call(
        'XCLAIM', stream(c), g, owner, 0, id, 'RETRYCOUNT', counts[i] + 1, 'FORCE')[1]
      redis.call('HDEL', part(g, c, 'n'), id)
      entries[id] = claimed and message(id, claimed[2])
    elseif fresh[c .. id] then
      plain[#plain + 1] = id
      entries[id] = fresh[c .. id]
    else
      old[#old + 1] = id
    end
  end
  each_thousand(plain, function(...)
    local args = {...}
    for _, word in ipairs({'RETRYCOUNT', 1, 'FORCE', 'JUSTID'}) do args[#args + 1] = word end
    redis.call('XCLAIM', stream(c), g, owner, 0, unpack(args))
  end)
  each_thousand(old, function(...)
    local args = {...}
    for _, word in ipairs({'RETRYCOUNT', 1, 'FORCE'}) do args[#args + 1] = word end
    for _, entry in ipairs(redis.call('XCLAIM', stream(c), g, owner, 0, unpack(args))) do
      entries[entry[1]] = message(entry[1], entry[2])
    end
  end)
  each_thousand(out, function(...) redis.call('HSET', part(g, c, 'out'), ...) end)
  for i, id in ipairs(ids) do
    local m = entries[id]
    if m then
      local n = #answer
      answer[n + 1], answer[n + 2], answer[n + 3], answer[n + 4] =
        RANK[c], id, (tonumber(counts[i] or 0)) + 1, m.id
      answer[n + 5], answer[n + 6], answer[n + 7] = m.key, m.headers, m.body
    else -- deleted by hand
      redis.call('HDEL', part(g, c, 'out'), id)
      redis.call('ZREM', part(g, c, 'live'), id)
    end
  end
end
return answer
