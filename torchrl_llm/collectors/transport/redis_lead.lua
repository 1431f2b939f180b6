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
