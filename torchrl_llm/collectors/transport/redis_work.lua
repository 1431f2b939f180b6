local worker, claims, action = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if redis.call('HEXISTS', state, 'closed') == 1 then return 'closed' end
if redis.call('HEXISTS', forgotten, worker) == 1 then return 'forgotten' end
local time = redis.call('TIME')
redis.call('HSET', seen, worker, string.format('%d.%06d', time[1], time[2]))
local known = number(claimed, worker) or 0
redis.call('HSET', claimed, worker, claims)
if known ~= claims then add(state, 'granted', known - claims) end
local function most(key, value)
  if value > (number(key, worker) or -1) then redis.call('HSET', key, worker, value) end
end
if action == 'claim' then
  local wanted = tonumber(ARGV[4])
  if (number(state, 'granted') or 0) < wanted then return 'wait' end
  add(state, 'granted', -wanted)
  add(claimed, worker, wanted)
elseif action == 'report' then
  most(generated, tonumber(ARGV[4]))
elseif action == 'put' or action == 'room' then
  local sequence, size = tonumber(ARGV[4]), tonumber(ARGV[5])
  if sequence < (number(delivered, worker) or 0) then
    -- Taken before, by a call whose answer was lost: its claims are used up.
    local uses = tonumber(ARGV[6])
    add(claimed, worker, -uses)
    add(state, 'granted', uses)
    return 'taken'
  end
  size = number(state, 'max_size') or size
  if redis.call('LLEN', queue) >= size then return 'wait' end
  if action == 'room' then return 'done' end
  redis.call('RPUSH', queue, ARGV[9])
  redis.call('RPUSH', queued, ARGV[6])
  add(claimed, worker, -tonumber(ARGV[6]))
  redis.call('HSET', delivered, worker, sequence + 1)
  most(generated, tonumber(ARGV[7]))
  if ARGV[8] ~= '' then redis.call('HSET', sent, worker, ARGV[8]) end
end
return 'done'
