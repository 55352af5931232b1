-- ARGV: group, owner. A consumer with entries in flight is kept, because deleting it would delete
-- its pending list.
for _, c in ipairs(CLASSES) do
  for _, group in ipairs(groups(c)) do
    if group.name == ARGV[1] then
      for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', stream(c), ARGV[1])) do
        if row[2] == ARGV[2] and row[4] == 0 then
          redis.call('XGROUP', 'DELCONSUMER', stream(c), ARGV[1], ARGV[2])
        end
      end
    end
  end
end
