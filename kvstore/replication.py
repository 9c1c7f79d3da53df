"""Which prefixes are wanted so much that another node should have them too, before this one dies.

A node that fetches a block has a copy of it from then on, so whatever is wanted on several nodes has several copies anyway. This
is about what is wanted here again and again: a node that does not have it is invited to fetch it from us, as a prefetch, within a
budget of bytes. It keeps the copy as any other copy of another node's block: it is evicted first, unless it is used there.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import xxhash

from kvstore.borrowing import Holder, Named
from kvstore.budget import WriteBudget

HOT_READS = 2
"""Reads of a prefix, within WINDOW_S, that make it worth a copy. The first one after it was stored may be the only one."""

WINDOW_S = 600.0
INVITE_AGAIN_S = 30.0
"""Whoever was invited has so much time to fetch; then another node is."""

MAX_WATCHED = 4096
"""Prefixes whose reads are counted, some 200 bytes each. Of more, those read longest ago are forgotten."""


class Invitation(NamedTuple):
    """Ask a node to fetch a prefix that we have."""

    node_id: str
    namespace: bytes
    keys: tuple[bytes, ...]


class Nodes(Protocol):
    """As much of transport/directory.Directory as is needed here."""

    def nodes(self) -> Sequence[Named]:
        """The others that are alive."""
        ...

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> Sequence[Holder]:
        """Who holds how much, farthest first."""
        ...


class _Watched:
    """Reads of one prefix since a time, who was invited to it, and when last."""

    __slots__ = ("invited", "invited_s", "num_reads", "since_s")

    def __init__(self, now_s: float) -> None:
        self.num_reads = 0
        self.since_s = now_s
        self.invited: tuple[str, ...] = ()
        self.invited_s = float("-inf")


class Replication:
    """Loop thread only. `copies` of a wanted prefix are to be in the cluster, ours among them; 1: none are made."""

    def __init__(self, nodes: Nodes, *, copies: int, bytes_per_s: int) -> None:
        self._nodes = nodes
        self._copies = copies
        self._budget = WriteBudget(bytes_per_s=bytes_per_s)
        self._watched: OrderedDict[tuple[bytes, bytes], _Watched] = OrderedDict()
        self._invitations: list[Invitation] = []
        self.num_invitations = 0

    def on_read(self, namespace: bytes, keys: Sequence[bytes], block_nbytes: int, now_s: float) -> None:
        """An engine here read the prefix `keys`, of which we have every block."""
        if self._copies < 2 or not keys:
            return
        watched = self._watch((namespace, keys[-1]), now_s)
        watched.num_reads += 1
        if watched.num_reads < HOT_READS or now_s - watched.invited_s < INVITE_AGAIN_S:
            return
        holders = [each.node.node_id for each in self._nodes.locate(namespace, keys) if each.num_blocks >= len(keys)]
        others = [node.node_id for node in self._nodes.nodes() if node.node_id not in holders]
        nbytes = len(keys) * block_nbytes
        if len(holders) + 1 >= self._copies or not others or not self._budget.allows(nbytes, now_s):
            return
        self._budget.spend(nbytes, now_s)
        watched.invited_s = now_s
        watched.invited = watched.invited if set(others).difference(watched.invited) else ()
        uninvited = [name for name in others if name not in watched.invited]
        node_id = max(uninvited, key=lambda name: xxhash.xxh3_64_intdigest(name.encode() + keys[0]))
        watched.invited += (node_id,)
        self._invitations.append(Invitation(node_id, namespace, tuple(keys)))
        self.num_invitations += 1

    def take_invitations(self) -> list[Invitation]:
        """Those that are to be sent now."""
        invitations, self._invitations = self._invitations, []
        return invitations

    def _watch(self, prefix: tuple[bytes, bytes], now_s: float) -> _Watched:
        watched = self._watched.setdefault(prefix, _Watched(now_s))
        self._watched.move_to_end(prefix)
        if now_s - watched.since_s > WINDOW_S:
            watched.since_s, watched.num_reads = now_s, 0
        if len(self._watched) > MAX_WATCHED:
            self._watched.popitem(last=False)
        return watched
