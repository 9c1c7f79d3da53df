"""The one script that a node runs on the directory's server: it says "alive", and hears what has changed since it last did.

All its keys carry the same hash tag, so that a cluster keeps them on one server:

    alive      zset  node id -> when its time is over, ms by the server's clock
    nodes      hash  node id -> its epoch, 20 digits, then its description
    heads      hash  node id -> where its log stands
    changed    zset  node id -> number of the last change of any of these; one that is in no hash has gone
    described  zset  node id -> number of the last change of its description
    numbers    hash  last -> number of the last change; floor -> before that, those that have gone are forgotten

A server that was restarted has another run id, and then, or when its numbers went back (it had an old copy on disk), the
answer is the whole list. Who is alive costs one call a node and interval; who has not changed costs no bytes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvstore.core.errors import RemoteProtocolError
from kvstore.transport.block_log import Head
from kvstore.transport.directory import Node

EPOCH_DIGITS = 20

_SCRIPT = """
local alive, nodes, heads, changed, described, numbers = unpack(KEYS)
local id, epoch, node, head, ttl_ms, known, known_run, action = unpack(ARGV)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''

local function change(who)
  local number = redis.call('HINCRBY', numbers, 'last', 1)
  redis.call('ZADD', changed, number, who)
  return number
end
local function remove(who)
  redis.call('ZREM', alive, who)
  redis.call('HDEL', nodes, who)
  redis.call('HDEL', heads, who)
  redis.call('ZREM', described, who)
  change(who)
end

for _, who in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now)) do remove(who) end

local found = redis.call('HGET', nodes, id)
if found and string.sub(found, 1, 20) > epoch then return {run, -1, 0, {}, {}} end
if action == 'leave' then
  if found and string.sub(found, 1, 20) == epoch then remove(id) end
  return {run, 0, 0, {}, {}}
end
if found ~= epoch .. node then
  redis.call('HSET', nodes, id, epoch .. node)
  redis.call('ZADD', described, change(id), id)
end
if redis.call('HGET', heads, id) ~= head then
  redis.call('HSET', heads, id, head)
  change(id)
end
redis.call('ZADD', alive, now + ttl_ms, id)

if redis.call('ZCARD', changed) > 2 * redis.call('ZCARD', alive) + 1000 then
  for _, who in ipairs(redis.call('ZRANGE', changed, 0, -1)) do
    if redis.call('HEXISTS', nodes, who) == 0 then redis.call('ZREM', changed, who) end
  end
  redis.call('HSET', numbers, 'floor', redis.call('HGET', numbers, 'last'))
end

local last = tonumber(redis.call('HGET', numbers, 'last'))
local floor = tonumber(redis.call('HGET', numbers, 'floor') or '0')
local is_whole = known_run ~= run or tonumber(known) > last or tonumber(known) < floor
if is_whole then known = '0' end
local there, gone = {}, {}
local ids = redis.call('ZRANGEBYSCORE', changed, '(' .. known, '+inf')
for start = 1, #ids, 1000 do
  local part = {unpack(ids, start, math.min(start + 999, #ids))}
  local part_heads = redis.call('HMGET', heads, unpack(part))
  for i, who in ipairs(part) do
    if not part_heads[i] then
      gone[#gone + 1] = who
    else
      local is_new = tonumber(redis.call('ZSCORE', described, who)) > tonumber(known)
      there[#there + 1] = who
      there[#there + 1] = part_heads[i]
      there[#there + 1] = is_new and redis.call('HGET', nodes, who) or ''
    end
  end
end
return {run, last, is_whole and 1 or 0, there, gone}
"""


class Change(NamedTuple):
    """A node whose log or description is another than before. `node` is None when the description is not."""

    node_id: str
    head: Head
    node: Node | None


class BeatAnswer(NamedTuple):
    """`is_superseded`: a later life of ours is there; nothing else was answered. `is_whole`: all nodes are in `changes`, and
    who is not may have gone with the server's memory. `rubbish`: what is wrong with nodes that are passed over."""

    is_superseded: bool
    is_whole: bool
    changes: tuple[Change, ...]
    gone: tuple[str, ...]
    rubbish: tuple[str, ...]
    nbytes: int


class Beat:
    """The script with what it last heard. One thread."""

    def __init__(self, cluster: str, node: Node) -> None:
        tag = f"kvstore:{{{cluster}}}"
        names = ("alive", "nodes", "heads", "changed", "described", "numbers")
        self._keys = [f"{tag}:{name}" for name in names]
        self._node = node
        self._encoded = node.encode()
        self._known = 0
        self._run = b""

    def forget(self) -> None:
        """Ask for the whole list next time."""
        self._known, self._run = 0, b""

    def say(self, evaluate: Callable[..., Any], head: Head, ttl_s: float) -> BeatAnswer:
        """Alive, and our log stands at `head`. Raises RemoteProtocolError for an answer that makes no sense."""
        answer = self._call(evaluate, _encode_head(head), ttl_s, "beat")
        try:
            run, last, is_whole, there, gone = answer
            gone_ids = tuple(who.decode() for who in gone)
            nbytes = sum(map(len, there)) + sum(map(len, gone)) + 64
        except (TypeError, ValueError) as err:
            raise RemoteProtocolError(f"directory: {err}", field="directory", value=str(answer)[:200]) from err
        changes, rubbish = _changes(there)
        if last >= 0:
            self._run, self._known = run, last
        return BeatAnswer(
            is_superseded=last < 0,
            is_whole=bool(is_whole),
            changes=changes,
            gone=gone_ids,
            rubbish=rubbish,
            nbytes=nbytes,
        )

    def leave(self, evaluate: Callable[..., Any]) -> None:
        """Not alive any more, at once."""
        self._call(evaluate, "", 1.0, "leave")

    def _call(self, evaluate: Callable[..., Any], head: str, ttl_s: float, action: str) -> Any:
        epoch = f"{self._node.epoch:0{EPOCH_DIGITS}d}"
        arguments = (self._node.node_id, epoch, self._encoded, head, int(ttl_s * 1000), self._known, self._run, action)
        return evaluate(_SCRIPT, len(self._keys), *self._keys, *arguments)


def _encode_head(head: Head) -> str:
    return " ".join(map(str, head))


def _changes(there: list[bytes]) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Triples as they come. One that is wrong (another program's, a later version's) costs nobody else's."""
    changes: list[Change] = []
    rubbish: list[str] = []
    for at in range(0, len(there) - 2, 3):
        try:
            changes.append(_change(*there[at : at + 3]))
        except (ValueError, RemoteProtocolError) as err:
            rubbish.append(f"{there[at][:128]!r}: {err}")
    return tuple(changes), tuple(rubbish)


def _change(node_id: bytes, head: bytes, node: bytes) -> Change:
    numbers = [int(word) for word in head.split()]
    if len(numbers) != len(Head._fields) or not 0 <= numbers[3] <= numbers[4]:
        raise ValueError(f"head: {head[:128]!r} is none")
    described = Node.decode(node[EPOCH_DIGITS:]) if node else None
    if described and (described.node_id.encode() != node_id or described.epoch != numbers[0]):
        raise ValueError(f"node: says it is {described.node_id} {described.epoch}, its head that of {numbers[0]}")
    return Change(node_id.decode(), Head(*numbers), described)
