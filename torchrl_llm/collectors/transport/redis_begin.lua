local state, queue, queued, taken, claimed, generated, delivered, sent, seen, forgotten =
  unpack(KEYS)
local function mended(key) redis.call('HSET', state, 'mended', key) end
for _, key in ipairs(KEYS) do
  local type = redis.call('TYPE', key).ok
  local expected = (key == queue or key == queued) and 'list' or 'hash'
  if type ~= 'none' and type ~= expected then
    redis.call('DEL', key)
    mended(key)
  end
end
local most_claims = 2^20
local function whole(text, least, most)
  local found = tonumber(text)
  if found and found == math.floor(found) and least <= found and found <= most then return found end
end
local function number(key, field)
  local least, most = 0, 2^53
  if key == state and field == 'granted' then least = -most end
  if key == claimed or field == 'claims' then most = most_claims end
  local text = redis.call('HGET', key, field)
  local found = whole(text, least, most)
  if text and not found then
    redis.call('HDEL', key, field)
    mended(key)
  end
  return found
end
local function add(key, field, more)
  redis.call('HSET', key, field, string.format('%d', (number(key, field) or 0) + more))
end
