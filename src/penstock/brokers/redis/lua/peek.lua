-- ARGV: limit. Returns 7 values for each entry that waits for a group:
-- class, entry, id, key, headers, body, due time in ms or 0.
local limit, answer = tonumber(ARGV[1]), {}
for _, c in ipairs(CLASSES) do
  local all, from, found, seen = groups(c), '-', 0, 0
  if #all > 0 then -- skip the settled history
    local floor = now
    for _, group in ipairs(all) do
      local oldest = redis.call('ZRANGE', part(group.name, c, 'live'), 0, 0, 'WITHSCORES')
      floor = math.min(floor, tonumber(oldest[2] or floor), born(group['last-delivered-id']))
    end
    from = string.format('%.0f-0', floor)
  end
  if redis.call('EXISTS', stream(c)) == 1 then
    repeat
      local entries = redis.call('XRANGE', stream(c), from, '+', 'COUNT', 200)
      for _, entry in ipairs(entries) do
        local id, wait, due = entry[1], #all == 0, 0
        local m = message(id, entry[2])
        for _, group in ipairs(all) do
          local g = group.name
          if redis.call('ZSCORE', part(g, c, 'live'), id) then
            if redis.call('HEXISTS', part(g, c, 'out'), id) == 0 then
              wait = true
              due = math.max(due, tonumber(redis.call('ZSCORE', part(g, c, 'due'),
                id .. ' ' .. m.key) or '0'))
            end
          else
            local ms, seq = string.match(id, '^(%d+)-(%d+)$')
            local last_ms, last_seq = string.match(group['last-delivered-id'], '^(%d+)-(%d+)$')
            ms, seq, last_ms, last_seq = tonumber(ms), tonumber(seq), tonumber(last_ms),
              tonumber(last_seq)
            if ms > last_ms or (ms == last_ms and seq > last_seq) then
              wait = true; due = math.max(due, m.at or 0)
            end
          end
        end
        if wait and found < limit then
          found = found + 1
          for _, v in ipairs({RANK[c], id, m.id, m.key, m.headers, m.body, due}) do
            answer[#answer + 1] = v
          end
        end
        from = '(' .. id
      end
      seen = seen + #entries
    until #entries < 200 or found >= limit or seen >= 5000
  end
end
return answer
