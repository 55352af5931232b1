-- ARGV: ordered 0|1, max_depth or '', retention in ms, group...
redis.call('HSETNX', base, 'ordered', ARGV[1])
redis.call('HSET', base, 'max_depth', ARGV[2], 'retention', ARGV[3])
local known = {}
for _, c in ipairs(CLASSES) do
  for _, g in ipairs(groups(c)) do known[g.name] = (known[g.name] or 0) + 1 end
end
local late = next(known) ~= nil
for i = 4, #ARGV do
  for _, c in ipairs(CLASSES) do
    if known[ARGV[i]] ~= 3 then
      redis.pcall('XGROUP', 'CREATE', stream(c), ARGV[i], late and '$' or '0', 'MKSTREAM')
    end
  end
end
return redis.call('HGET', base, 'ordered')
