-- ARGV, for each message: class, id, key, headers as JSON or '', not before in ms or '', body.
-- Returns one letter for each message: o (ok) or f (full).
local spec = redis.call('HMGET', base, 'ordered', 'max_depth')
local ordered, room = spec[1] == '1', tonumber(spec[2] or '')
if room then
  local depth = {}
  for _, c in ipairs(CLASSES) do
    for _, g in ipairs(groups(c)) do
      local unread = g.lag or #redis.call(
        'XRANGE', stream(c), '(' .. g['last-delivered-id'], '+', 'COUNT', 1000)
      depth[g.name] = (depth[g.name] or 0) + unread + redis.call('ZCARD', part(g.name, c, 'live'))
    end
  end
  local most = 0
  for _, n in pairs(depth) do most = math.max(most, n) end
  if next(depth) == nil then
    for _, c in ipairs(CLASSES) do most = most + redis.call('XLEN', stream(c)) end
  end
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
    -- If the server's clock went back, all new ids have the same millisecond and only their number
    -- grows. Positions have room for two million numbers, so start a new millisecond at a million.
    local name = '*'
    if #last > 20 then name = string.format('%.0f-0', born(last) + 1) end
    last = redis.call('XADD', stream(c), name, unpack(fields))
    answers[#answers + 1] = 'o'
  end
end
return table.concat(answers)
