"""The Lua of the Redis broker: every change to a topic is one script, so it happens whole or not at
all. Looking is in redis_looking.

Names, all under one hash tag, `{shop.requests}` for topic `requests` of `shop` (its dead letters:
`{shop.requests}.dead`):

    BASE                    hash: the topic's settings BASE:high|normal|low    the streams, with a
    consumer group per group; what is in a group's pending list is in flight BASE:GROUP
    hash: the group's counters BASE:GROUP:CLASS:live   sorted set: entries that were read and are
    not finished, by time BASE:GROUP:CLASS:keys   sorted set: keys with work, by when they may be
    (or were last) served; +inf: an ordered key of which one is out BASE:GROUP:CLASS:k:KEY  list:
    entries of a key that are ready BASE:GROUP:CLASS:due    sorted set: delayed entries, by when
    they are due BASE:GROUP:CLASS:out    hash: entry -> token and key of the delivery that is out
    BASE:GROUP:CLASS:n      hash: entry -> deliveries so far, of those that are not out

A stream hands out in its own order, so one busy host would stop all others. Hence new entries are
read ahead (NOACK) and sorted by key; handing out is XCLAIM with FORCE into the pending list of
whoever asked, and XAUTOCLAIM finds what a dead one left behind.
"""

from __future__ import annotations

from penstock.stores.redis import Script

COMMON = """
local base = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local micros = time[1] * 1000000 + time[2]
local CLASSES = {'high', 'normal', 'low'}
local RANK = {high = 0, normal = 1, low = 2}

local function stream(c) return base .. ':' .. c end
local function part(g, c, what) return base .. ':' .. g .. ':' .. c .. ':' .. what end
local function born(id) return tonumber(string.match(id, '^%d+')) end

-- unpack() has a limit; batches do not
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

-- The first groups of a topic see all that is there; one that comes later sees what is published from then on (and may replay).
local function create(g)
  local start = '0'
  for _, c in ipairs(CLASSES) do if #groups(c) > 0 then start = '$' end end
  for _, c in ipairs(CLASSES) do redis.pcall('XGROUP', 'CREATE', stream(c), g, start, 'MKSTREAM') end
end

-- Anyone may XADD: what has no body of ours is handed out too, and condemned by whoever cannot read it.
local function message(id, fields)
  if fields[1] == 'id' and fields[3] == 'key' and fields[5] == 'body' and not fields[7] then -- nearly all
    return {entry = id, id = fields[2], key = fields[4], headers = '', body = fields[6]}
  end
  local m = {}
  for i = 1, #fields, 2 do m[fields[i]] = fields[i + 1] end
  return {entry = id, id = m.id or id, key = m.key or '', headers = m.headers or '', body = m.body or fields[2] or '', at = tonumber(m.at or '')}
end

local function offer(g, c, key, ids, first)
  local list = part(g, c, 'k:' .. key)
  each_thousand(ids, function(...) redis.call(first and 'LPUSH' or 'RPUSH', list, ...) end)
  redis.call('ZADD', part(g, c, 'keys'), 'NX', micros, key) -- behind those that wait already, or a stream of new keys would starve them
end

local function unlock(g, c, key)
  if redis.call('EXISTS', part(g, c, 'k:' .. key)) == 1 then redis.call('ZADD', part(g, c, 'keys'), micros, key)
  else redis.call('ZREM', part(g, c, 'keys'), key) end
end

-- Reads up to `count` new entries of each class and sorts them by key. Returns whether there may be more.
local function sort(g, owner, count, fresh)
  local names, starts = {}, {}
  for i, c in ipairs(CLASSES) do names[i], starts[i] = stream(c), '>' end
  local args = {'GROUP', g, owner, 'COUNT', count, 'NOACK', 'STREAMS', names[1], names[2], names[3], '>', '>', '>'}
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
"""

ENSURE = Script(
    "#!lua\n"
    + COMMON
    + """
-- ARGV: ordered 0|1, max_depth or '', retention in ms, group...
redis.call('HSETNX', base, 'ordered', ARGV[1])
redis.call('HSET', base, 'max_depth', ARGV[2], 'retention', ARGV[3])
local known = {}
for _, c in ipairs(CLASSES) do for _, g in ipairs(groups(c)) do known[g.name] = (known[g.name] or 0) + 1 end end
local late = next(known) ~= nil
for i = 4, #ARGV do
  for _, c in ipairs(CLASSES) do
    if known[ARGV[i]] ~= 3 then redis.pcall('XGROUP', 'CREATE', stream(c), ARGV[i], late and '$' or '0', 'MKSTREAM') end
  end
end
return redis.call('HGET', base, 'ordered')
"""
)

PUBLISH = Script(
    "#!lua\n"
    + COMMON
    + """
-- ARGV, for each message: class, id, key, headers as JSON or '', not before in ms or '', body. Returns one letter for each.
local spec = redis.call('HMGET', base, 'ordered', 'max_depth')
local ordered, room = spec[1] == '1', tonumber(spec[2] or '')
if room then
  local depth = {}
  for _, c in ipairs(CLASSES) do
    for _, g in ipairs(groups(c)) do
      local unread = g.lag or #redis.call('XRANGE', stream(c), '(' .. g['last-delivered-id'], '+', 'COUNT', 1000)
      depth[g.name] = (depth[g.name] or 0) + unread + redis.call('ZCARD', part(g.name, c, 'live'))
    end
  end
  local most = 0
  for _, n in pairs(depth) do most = math.max(most, n) end
  if next(depth) == nil then for _, c in ipairs(CLASSES) do most = most + redis.call('XLEN', stream(c)) end end
  room = room - most
end
local answers, last = {}, ''
for i = 1, #ARGV, 6 do
  if room and room <= 0 then
    answers[#answers + 1] = 'f'
  else
    if room then room = room - 1 end
    local c = ordered and 'normal' or CLASSES[ARGV[i] + 1]
    local fields = {'id', ARGV[i + 1], 'key', ARGV[i + 2], 'body', ARGV[i + 5]}
    if ARGV[i + 3] ~= '' then fields[7] = 'headers'; fields[8] = ARGV[i + 3] end
    if ARGV[i + 4] ~= '' then fields[#fields + 1] = 'at'; fields[#fields + 1] = ARGV[i + 4] end
    -- While the server's clock is behind, numbers in one millisecond grow; positions have room for a million of them.
    local name = '*'
    if #last > 20 then name = string.format('%.0f-0', born(last) + 1) end
    last = redis.call('XADD', stream(c), name, unpack(fields))
    answers[#answers + 1] = 'o'
  end
end
return table.concat(answers)
"""
)

RECEIVE = Script(
    "#!lua flags=allow-oom\n"  # or a full server could never be drained
    + COMMON
    + """
-- ARGV: group, owner, lease in ms, limit, per key, places of high, normal, low. Returns token, ms until a look is worth while, then 7 values for each.
local g, owner, lease, limit, per_key = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
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

-- What was left behind. Whoever extends resets its idle time, so idle for a whole lease is dead or as good as dead.
local function sweep()
  for _, c in ipairs(CLASSES) do
    local cursor, found = '0-0', 0
    repeat
      local got = redis.call('XAUTOCLAIM', stream(c), g, owner, lease, cursor, 'COUNT', 100, 'JUSTID')
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
      for _, id in ipairs(got[3] or {}) do -- deleted by hand: there is nothing left to hand out
        redis.call('ZREM', part(g, c, 'live'), id)
        redis.call('HDEL', part(g, c, 'out'), id)
      end
    until cursor == '0-0' or found >= 500
  end
  for _, c in ipairs(CLASSES) do -- a consumer removed by hand took its pending list along: what only we know of is ready again
    local out = part(g, c, 'out')
    if redis.call('HLEN', out) > redis.call('XPENDING', stream(c), g)[1] then
      for _, id in ipairs(redis.call('HKEYS', out)) do
        if #redis.call('XPENDING', stream(c), g, id, id, 1) == 0 then back(c, id, key_of(c, id), 1) end
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
    -- only by one that was handed out before: one that merely waited must not set free a key of which another is out
    if ordered and redis.call('HEXISTS', part(g, c, 'n'), id) == 1 then unlock(g, c, key) end
  end
end

-- Round robin between keys by the time they were last served; a key's entries in order of publication.
local pick
function pick(c, places)
  local keys, served = part(g, c, 'keys'), 0
  for _ in pairs(taken) do served = served + 1 end
  local round, got, empty = redis.call('ZRANGEBYSCORE', keys, '-inf', micros, 'LIMIT', 0, places + served), 0, false
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
  if empty and got < places then pick(c, places - got) end -- keys that were only held took the places of others
end

local told = redis.call('HMGET', state, 'swept', 'cap')
local swept, cap = tonumber(told[1] or '0'), tonumber(told[2] or '1000')
local ahead = math.min(math.max(100, 2 * limit), cap) -- further than asked for, or the work of one key hides that of the others
local more = sort(g, owner, ahead, fresh)
if type(more) == 'table' then return more end
local bytes, read = 0, 0
for _, m in pairs(fresh) do bytes, read = bytes + #m.body, read + 1 end
if read > 0 then -- large bodies are read ahead in smaller numbers: they pass through this script's memory
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
  local again = total == 0 and more and rounds < 5 -- all that was read belongs to keys that are held or locked: look further
  if again then more = sort(g, owner, ahead, fresh) end
until not again

if total == 0 then -- when will there be something?
  local wait, last = more and 0 or 60000, {}
  for i, c in ipairs(CLASSES) do
    local due = redis.call('ZRANGE', part(g, c, 'due'), 0, 0, 'WITHSCORES')
    if due[2] then wait = math.min(wait, tonumber(due[2]) - now) end
    local key = redis.call('ZRANGE', part(g, c, 'keys'), 0, 0, 'WITHSCORES')
    if key[2] then wait = math.min(wait, key[2] == 'inf' and 100 or (tonumber(key[2]) - micros) / 1000) end
    for _, group in ipairs(groups(c)) do if group.name == g then last[i] = group['last-delivered-id'] end end
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
      local claimed = redis.call('XCLAIM', stream(c), g, owner, 0, id, 'RETRYCOUNT', counts[i] + 1, 'FORCE')[1]
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
    for _, entry in ipairs(redis.call('XCLAIM', stream(c), g, owner, 0, unpack(args))) do entries[entry[1]] = message(entry[1], entry[2]) end
  end)
  each_thousand(out, function(...) redis.call('HSET', part(g, c, 'out'), ...) end)
  for i, id in ipairs(ids) do
    local m = entries[id]
    if m then
      local n = #answer
      answer[n + 1], answer[n + 2], answer[n + 3], answer[n + 4] = RANK[c], id, (tonumber(counts[i] or 0)) + 1, m.id
      answer[n + 5], answer[n + 6], answer[n + 7] = m.key, m.headers, m.body
    else -- deleted by hand
      redis.call('HDEL', part(g, c, 'out'), id)
      redis.call('ZREM', part(g, c, 'live'), id)
    end
  end
end
return answer
"""
)

_FENCED = """
-- ARGV: group, ..., then items. An item whose token is not the one that is out touches nothing.
local g = ARGV[1]
local out = {}
local function fence(from, width)
  local ids = {high = {}, normal = {}, low = {}}
  for i = from, #ARGV, width do table.insert(ids[ARGV[i]], ARGV[i + 1]) end
  for _, c in ipairs(CLASSES) do
    out[c] = {}
    each_thousand(ids[c], function(...)
      local names = {...}
      for i, v in ipairs(redis.call('HMGET', part(g, c, 'out'), ...)) do out[c][names[i]] = v end
    end)
  end
end
local function held(c, id, token)
  local found, key = string.match(out[c][id] or '', '^(%d+) (.*)$')
  return found == token and key
end
"""

SETTLE = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + _FENCED
    + """
-- Items of 6: class, entry, token, verb, deliveries, and what the verb needs: ms for a retry, headers for the dead.
local ordered = redis.call('HGET', base, 'ordered') == '1'
local gone = {high = {}, normal = {}, low = {}} -- in flight no longer
local done = {high = {}, normal = {}, low = {}} -- finished
local released, answers = {}, {}
fence(2, 6)
for i = 2, #ARGV, 6 do
  local c, id, verb, count, more = ARGV[i], ARGV[i + 1], ARGV[i + 3], tonumber(ARGV[i + 4]), ARGV[i + 5]
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
        redis.call('XADD', base .. '.dead:normal', '*', 'id', m.id, 'key', m.key, 'body', m.body, 'headers', more)
      end
      table.insert(done[c], id)
      if ordered then unlock(g, c, key) end
    end
  end
end
for i = #released, 1, -1 do -- backwards, each to the front: they lie as they did
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

-- Now and then: history beyond its retention goes, but nothing that any group, ours or not, has still to read or to finish.
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
      if group.pending > 0 then floor = older(floor, redis.call('XPENDING', stream(c), group.name)[2]) end
      local oldest = redis.call('ZRANGE', part(group.name, c, 'live'), 0, 0, 'WITHSCORES')
      if oldest[2] then floor = older(floor, string.format('%.0f-0', oldest[2])) end
      for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', stream(c), group.name)) do -- workers that ended long ago
        if row[4] == 0 and row[6] > 3600000 then redis.call('XGROUP', 'DELCONSUMER', stream(c), group.name, row[2]) end
      end
    end
    if redis.call('EXISTS', stream(c)) == 1 then redis.call('XTRIM', stream(c), 'MINID', '~', floor) end
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
"""
)

EXTEND = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + _FENCED
    + """
-- ARGV: group, owner, idle in ms to start from, then items of 3: class, entry, token.
local answers, ids = {}, {high = {}, normal = {}, low = {}}
fence(4, 3)
for i = 4, #ARGV, 3 do
  local kept = held(ARGV[i], ARGV[i + 1], ARGV[i + 2])
  answers[#answers + 1] = kept and '1' or '0'
  if kept then table.insert(ids[ARGV[i]], ARGV[i + 1]) end
end
for _, c in ipairs(CLASSES) do
  each_thousand(ids[c], function(...)
    local args = {...}
    for _, word in ipairs({'IDLE', ARGV[3], 'JUSTID'}) do args[#args + 1] = word end
    redis.call('XCLAIM', stream(c), g, ARGV[2], 0, unpack(args))
  end)
end
return table.concat(answers)
"""
)

HOLD = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + """
-- ARGV: group, then key and time in microseconds, by turns. Also for a key, or a class of it, of which nothing is there yet.
for i = 2, #ARGV, 2 do
  for _, c in ipairs(CLASSES) do redis.call('ZADD', part(ARGV[1], c, 'keys'), 'GT', ARGV[i + 1], ARGV[i]) end
end
"""
)

LEAVE = Script(
    "#!lua flags=allow-oom\n"
    + COMMON
    + """
-- ARGV: group, owner. A consumer that has something in flight stays, since its pending list would go with it.
for _, c in ipairs(CLASSES) do
  for _, group in ipairs(groups(c)) do
    if group.name == ARGV[1] then
      for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', stream(c), ARGV[1])) do
        if row[2] == ARGV[2] and row[4] == 0 then redis.call('XGROUP', 'DELCONSUMER', stream(c), ARGV[1], ARGV[2]) end
      end
    end
  end
end
"""
)
