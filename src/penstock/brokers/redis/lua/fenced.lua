-- ARGV: group, ..., then items. An item with an outdated token changes nothing.
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
