"""Lua scripts of claims, slots and proxy health on Redis, and the names of their keys.

The scripts make no decisions. A script writes a value only if no other process has changed it since
the caller read it. See `rules` for the decisions.

All keys have the same hash tag, such as `{shop.claims}`:

    BASE:url         hash: URL key -> owner, last success, next event
    BASE:url:at      sorted set: URL keys by the time of their claim
    BASE:host        hash: host -> its complete state
    BASE:slowed      hash: throttled, blocked or paused host -> until when, and since when slower
    BASE:own         hash: host with its own limits -> concurrency, or "-"
    BASE:exempt      set: hosts whose robots.txt is not obeyed
    BASE:version     number of changes of `slowed`, `own` and `exempt`
    BASE:robots:URL  hash: the cached robots.txt of an origin. Expires.
    BASE:noted       hash: number -> an exception, and "n" -> the last number
    BASE:noted:on    hash: kind and host -> number of the current exception
    BASE:proxy       hash: proxy and host -> health
    BASE:proxy:at    sorted set: proxy and host by the time of the last change
    BASE:pools       hash: pool -> result of the last fetch of its list
"""

from __future__ import annotations

from penstock.stores.redis import Script


def base_of(prefix: str) -> str:
    return "{" + f"{prefix}.claims".replace("{", "_").replace("}", "_") + "}"


# Take claims. ARGV: now, then for each claim: URL key, new owner, last success or '', expected
# owner or ''. Returns 1 for each claim that the new owner holds now, also if it held it before.
# Otherwise returns 0.
TAKE = Script(
    """#!lua
local url, at, answers = KEYS[1] .. ':url', KEYS[1] .. ':url:at', {}
for i = 2, #ARGV, 4 do
  local key, owner, good, from = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local held = redis.call('HGET', url, key)
  local holder = held and cmsgpack.unpack(held)[1] or ''
  if holder == owner then
    answers[#answers + 1] = 1
  elseif holder == from then
    redis.call('HSET', url, key, cmsgpack.pack({owner, good, ''}))
    redis.call('ZADD', at, ARGV[1], key)
    answers[#answers + 1] = 1
  else
    answers[#answers + 1] = 0
  end
end
return answers
"""
)

# Set the next event of a claim. ARGV: URL key, event, expected owner. Returns 1 if the claim has
# that owner, and else 0.
NEXT = Script(
    """#!lua
local held = redis.call('HGET', KEYS[1] .. ':url', ARGV[1])
local row = held and cmsgpack.unpack(held)
if not row or row[1] ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1] .. ':url', ARGV[1], cmsgpack.pack({row[1], row[2], ARGV[2]}))
return 1
"""
)

# Delete old claims and ended exceptions. ARGV: time before which they are old, maximum number of
# claims. Returns the number of deleted claims.
PRUNE = Script(
    """#!lua
local old = redis.call(
  'ZRANGEBYSCORE', KEYS[1] .. ':url:at', '-inf', '(' .. ARGV[1], 'LIMIT', 0, ARGV[2])
for _, key in ipairs(old) do
  redis.call('HDEL', KEYS[1] .. ':url', key)
  redis.call('ZREM', KEYS[1] .. ':url:at', key)
end
local noted = redis.call('HGETALL', KEYS[1] .. ':noted')
for i = 1, #noted, 2 do
  local row = noted[i] ~= 'n' and cmsgpack.unpack(noted[i + 1])
  if row and row.ended and row.ended < tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1] .. ':noted', noted[i])
  end
end
return #old
"""
)

# Write states of hosts. ARGV for each host: host, state that the caller read or '', new state, and
# the two values of `claims.aside`. Returns 1 for each written state. If another process has changed
# a state, returns that state.
KEEP = Script(
    """#!lua
local base, answers, news = KEYS[1], {}, false
local function put(name, host, value)
  local had = redis.call('HGET', name, host) or ''
  if had == value then return end
  news = true
  if value == '' then redis.call('HDEL', name, host) else redis.call('HSET', name, host, value) end
end
for i = 1, #ARGV, 5 do
  local host = ARGV[i]
  local now = redis.call('HGET', base .. ':host', host) or ''
  if now ~= ARGV[i + 1] then
    answers[#answers + 1] = now
  else
    answers[#answers + 1] = 1
    if ARGV[i + 2] ~= now then
      redis.call('HSET', base .. ':host', host, ARGV[i + 2])
      put(base .. ':slowed', host, ARGV[i + 3])
      put(base .. ':own', host, ARGV[i + 4])
    end
  end
end
if news then redis.call('INCR', base .. ':version') end
return answers
"""
)

# Read the view of hosts. ARGV: version of the caller's view. Returns the server's time and version.
# If the version is different, also returns `slowed`, `own` and `exempt`.
LOOK = Script(
    """#!lua
local base, time = KEYS[1], redis.call('TIME')
local version = redis.call('GET', base .. ':version') or '0'
if version == ARGV[1] then return {time[1], time[2], version} end
return {time[1], time[2], version, redis.call('HGETALL', base .. ':slowed'),
  redis.call('HGETALL', base .. ':own'), redis.call('SMEMBERS', base .. ':exempt')}
"""
)

# Add an exception. ARGV: kind, host, now, the exception, 1 if it is current from now on. A current
# exception ends the previous one of the same kind and host.
NOTE = Script(
    """#!lua
local base, name = KEYS[1], ARGV[1] .. ' ' .. ARGV[2]
local number = redis.call('HINCRBY', base .. ':noted', 'n', 1)
redis.call('HSET', base .. ':noted', number, ARGV[4])
if ARGV[5] == '1' then
  local held = redis.call('HGET', base .. ':noted:on', name)
  if held then
    local row = cmsgpack.unpack(redis.call('HGET', base .. ':noted', held))
    row.ended = tonumber(ARGV[3])
    redis.call('HSET', base .. ':noted', held, cmsgpack.pack(row))
  end
  redis.call('HSET', base .. ':noted:on', name, number)
  if ARGV[1] == 'robots' then redis.call('SADD', base .. ':exempt', ARGV[2]) end
  redis.call('INCR', base .. ':version')
end
"""
)

# End the current exception. ARGV: kind, host, now. Returns 1 if there was a current exception.
END = Script(
    """#!lua
local base, name = KEYS[1], ARGV[1] .. ' ' .. ARGV[2]
local held = redis.call('HGET', base .. ':noted:on', name)
if not held then return 0 end
local row = cmsgpack.unpack(redis.call('HGET', base .. ':noted', held))
row.ended = tonumber(ARGV[3])
redis.call('HSET', base .. ':noted', held, cmsgpack.pack(row))
redis.call('HDEL', base .. ':noted:on', name)
if ARGV[1] == 'robots' then redis.call('SREM', base .. ':exempt', ARGV[2]) end
redis.call('INCR', base .. ':version')
return 1
"""
)

# Write the health of a proxy. ARGV: proxy and host, health that the caller read or '', new health,
# now. Returns 1. If another process has changed the health, returns that health.
HEALTH = Script(
    """#!lua
local now = redis.call('HGET', KEYS[1] .. ':proxy', ARGV[1]) or ''
if now ~= ARGV[2] then return now end
if ARGV[3] ~= now then
  redis.call('HSET', KEYS[1] .. ':proxy', ARGV[1], ARGV[3])
  redis.call('ZADD', KEYS[1] .. ':proxy:at', ARGV[4], ARGV[1])
end
return 1
"""
)

# Read changed health. ARGV: time of the oldest change. Returns proxy and host, and health, for
# each change.
CHANGED = Script(
    """#!lua
local answer = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1] .. ':proxy:at', ARGV[1], '+inf')) do
  answer[#answer + 1] = name
  answer[#answer + 1] = redis.call('HGET', KEYS[1] .. ':proxy', name) or ''
end
return answer
"""
)

# Delete health that has not changed. ARGV for each: proxy and host, health that the caller read.
FORGET = Script(
    """#!lua
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1] .. ':proxy', ARGV[i]) == ARGV[i + 1] then
    redis.call('HDEL', KEYS[1] .. ':proxy', ARGV[i])
    redis.call('ZREM', KEYS[1] .. ':proxy:at', ARGV[i])
  end
end
"""
)

# Store a robots.txt. ARGV: origin, status, until, expiry time in milliseconds, and the body if
# there is one.
ROBOTS = Script(
    """#!lua
local name = KEYS[1] .. ':robots:' .. ARGV[1]
redis.call('DEL', name)
redis.call('HSET', name, 'status', ARGV[2], 'until', ARGV[3])
if ARGV[5] then redis.call('HSET', name, 'body', ARGV[5]) end
redis.call('PEXPIREAT', name, ARGV[4])
"""
)
