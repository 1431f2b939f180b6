local worker = ARGV[1]
local counts = redis.call('HGET', forgotten, worker)
if counts and pcall(cjson.decode, counts) then return counts end
local function own(key) return number(key, worker) or 0 end
local seen_s = tonumber(redis.call('HGET', seen, worker))
if not (seen_s and math.abs(seen_s) < 2^53) then seen_s = 0 end
counts = cjson.encode({
  claimed = own(claimed), generated = own(generated), delivered = own(delivered),
  sent = own(sent), seen = seen_s,
})
add(state, 'granted', own(claimed))
redis.call('HSET', forgotten, worker, counts)
for _, key in ipairs({claimed, generated, delivered, sent, seen}) do
  redis.call('HDEL', key, worker)
end
return counts
