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
