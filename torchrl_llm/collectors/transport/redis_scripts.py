"""Lua scripts that a :class:`RedisChannel` runs in the server.

Each of them runs as a whole or not at all, and may be run again by a client that never got its
answer. The state is in these keys:

- ``state``: hash of ``run``, ``version``, ``max_size``, ``granted`` (rows that may be claimed),
  ``closed``, ``taken`` (how many deliveries were handed out), ``led`` (when the learner called
  last), and ``mended`` (what was found that neither learner nor worker had written);
- ``queue`` and ``queued``: lists of the deliveries that wait, and of the claims that each uses up;
- ``taken``: the delivery that was handed out last, until the learner asks for the next;
- ``claimed``, ``generated``, ``delivered``, ``sent``, ``seen``: hashes over the workers;
- ``forgotten``: hash of dead workers, their last counts as JSON.

Two numbers are never trusted to a server that may lose them. A worker says with each call how many
rows it holds claims for, and the difference to what is written goes back to (or is taken from) what
is granted. The learner says how many rows are out in all, and what is granted is what of them is
neither claimed nor waiting. So rows that a restart has swallowed are granted again.

Others may write to the server too. A key of another type, and a number that is malformed or that
no learner and no worker writes, are dropped where they are met, and count as missing; ``mended``
tells the learner.
"""

from __future__ import annotations

KEYS = (
    *("state", "queue", "queued", "taken"),
    *("claimed", "generated", "delivered", "sent", "seen", "forgotten"),
)

_BEGIN = """
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
"""

WORK = (
    _BEGIN
    + """
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
"""
)
"""``ARGV``: worker, rows it holds claims for, and the action with its arguments."""

LEAD = (
    _BEGIN
    + """
local run, version, size, closed = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local out, delta, got, wants = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8]
local lost = 0
if redis.call('HGET', state, 'run') ~= run then
  lost = 1
  redis.call('HSET', state, 'run', run)
end
local time = redis.call('TIME')
redis.call('HSET', state, 'version', version, 'max_size', size, 'led',
  string.format('%d.%06d', time[1], time[2]))
if closed == '1' then redis.call('HSET', state, 'closed', 1) end
local handed = number(taken, 'number')
handed = handed and string.format('%d', handed)
local open = handed and handed ~= got and redis.call('HEXISTS', taken, 'data') == 1
local free = out
for _, worker in ipairs(redis.call('HKEYS', claimed)) do
  if redis.call('HEXISTS', seen, worker) == 1 then
    free = free - (number(claimed, worker) or 0)
  else
    redis.call('HDEL', claimed, worker)
    mended(claimed)
  end
end
local surplus = redis.call('LLEN', queued) - redis.call('LLEN', queue)
if surplus > 0 then
  redis.call('LTRIM', queued, surplus, -1)
  mended(queued)
end
for place, text in ipairs(redis.call('LRANGE', queued, 0, -1)) do
  local claims = whole(text, 0, most_claims)
  if claims then
    free = free - claims
  else
    redis.call('LSET', queued, place - 1, 0)
    mended(queued)
  end
end
if open then free = free - (number(taken, 'claims') or 0) end
local more = math.max(free + delta, math.min(free, 0))
redis.call('HSET', state, 'granted', more)
local foreign = redis.call('HGET', state, 'mended') or ''
redis.call('HDEL', state, 'mended')
if wants == '0' then return {lost, more - free, foreign, '', ''} end
if not open then
  local data = redis.call('LPOP', queue)
  if not data then return {lost, more - free, foreign, '', ''} end
  local claims = redis.call('LPOP', queued) or '0'
  add(state, 'taken', 1)
  handed = redis.call('HGET', state, 'taken')
  redis.call('HSET', taken, 'number', handed, 'claims', claims, 'data', data)
end
return {lost, more - free, foreign, handed, redis.call('HGET', taken, 'data')}
"""
)
"""``ARGV``: run, version, size, whether closed, rows out in all, rows to grant in addition, number
of the delivery that was got last, whether another is wanted. Returns whether the state was lost,
rows granted, a key that held something else, number and bytes of the delivery."""

FORGET = (
    _BEGIN
    + """
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
"""
)
"""``ARGV``: worker. Returns its last counts as JSON."""
