-- ARGV: group, then for each key its name and the time in microseconds.
-- A key may be held before it has entries in a class.
for i = 2, #ARGV, 2 do
  for _, c in ipairs(CLASSES) do
    redis.call('ZADD', part(ARGV[1], c, 'keys'), 'GT', ARGV[i + 1], ARGV[i])
  end
end
