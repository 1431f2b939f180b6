-- Functions that all scripts of RedisChannel share; each script is this and one of the others.
--
-- Each of them runs as a whole or not at all, and may be run again by a client that never got its
-- answer. The state is in these keys:
--
-- - state: hash of run, version, max_size, granted (rows that may be claimed),
--   closed, taken (how many deliveries were handed out), led (when the learner called
--   last), and mended (what was found that neither learner nor worker had written);
-- - queue and queued: lists of the deliveries that wait, and of the claims that each uses up;
-- - taken: the delivery that was handed out last, until the learner asks for the next;
-- - claimed, generated, delivered, sent, seen: hashes over the workers;
-- - forgotten: hash of dead workers, their last counts as JSON.
--
-- Two numbers are never trusted to a server that may lose them. A worker says with each call how many
-- rows it holds claims for, and the difference to what is written goes back to (or is taken from) what
-- is granted. The learner says how many rows are out in all, and what is granted is what of them is
-- neither claimed nor waiting. So rows that a restart has swallowed are granted again.
--
-- Others may write to the server too. A key of another type, and a number that is malformed or that
-- no learner and no worker writes, are dropped where they are met, and count as missing; mended
-- tells the learner.

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
