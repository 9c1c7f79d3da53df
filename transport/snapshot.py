"""What a directory knows of the others, kept from their logs by one thread, looked up by another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.core.errors import RemoteProtocolError
from kvstore.transport.block_log import Cursor, LogChunk, fold, records_of
from kvstore.transport.directory import MAX_HOLDINGS, Holding, Node, fingerprints
from kvstore.transport.holder_table import MAX_NODE_INDEX, HolderTable

MAX_NODES = 4096
"""Others that a directory follows. More: those that came later are not known, and counted."""


@dataclass(slots=True)
class _Followed:
    """A node and how far we are with its log. `index` names it in the table; a new one voids all entries under the old."""

    node: Node
    index: int
    cursor: Cursor
    hidden_since_s: float | None = None


class Snapshot:
    """The others' nodes and blocks.

    `find`, `nodes` and `locate` may be called from any thread, `locate` from one at a time; everything else belongs to the
    directory's thread. A node that is hidden (not heard of) is in no answer, but its blocks are kept for `forget_s`, so that
    a partition that heals costs what has changed meanwhile and no more.
    """

    def __init__(self, own_id: str, *, forget_s: float = 60.0) -> None:
        self.num_resyncs = 0
        self.num_refused = 0
        self._own_id = own_id
        self._forget_s = forget_s
        self._table = HolderTable()
        self._followed: dict[str, _Followed] = {}
        self._visible: tuple[Node, ...] = ()
        self._by_index: list[Node | None] = [None] * (MAX_NODE_INDEX + 1)
        self._free: list[int] = list(range(MAX_NODE_INDEX, 0, -1))
        self._void: set[int] = set()  # indexes whose entries are still in the table

    @property
    def num_entries(self) -> int:
        """(block, node) pairs in the table."""
        return self._table.num_entries

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def nodes(self) -> tuple[Node, ...]:
        """The others that are alive."""
        return self._visible

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> tuple[Holding, ...]:
        """See Directory."""
        found = self._table.find(fingerprints(namespace, hashes))
        if not len(found.nodes):
            return ()
        indexes, column = np.unique(found.nodes, return_inverse=True)
        lengths = np.zeros(len(indexes), np.int64)
        np.maximum.at(lengths, column, found.positions + 1)
        holdings = [
            Holding(node, length)
            for index, length in zip(indexes.tolist(), lengths.tolist(), strict=True)
            if (node := self._by_index[index])
        ]
        holdings.sort(key=lambda holding: (-holding.num_blocks, holding.node.node_id))
        return tuple(holdings[:MAX_HOLDINGS])

    def see(self, node: Node) -> Cursor | None:
        """The node is alive and describes itself so. Where its log is to be read from; None when it is not followed: it is
        ourselves, an earlier life of one that is alive, or one too many."""
        if node.node_id == self._own_id:
            return None
        known = self._followed.get(node.node_id)
        if known and node.epoch < known.node.epoch and known.hidden_since_s is None:
            return None
        if known and node.epoch != known.node.epoch:  # a smaller one behind a life that is hidden: its clock went back
            self._drop(known)
            known = None
        if known is None:
            if len(self._followed) >= MAX_NODES or not self._free:
                self.num_refused += 1
                return None
            known = self._followed[node.node_id] = _Followed(node, self._free.pop(), Cursor())
        if known.node != node or known.hidden_since_s is not None or self._by_index[known.index] is None:
            known.node, known.hidden_since_s = node, None
            self._by_index[known.index] = node
            self._show()
        return known.cursor

    def apply(self, node_id: str, chunk: LogChunk) -> None:
        """Take in what its log says. Raises RemoteProtocolError when it does not go on from where we are."""
        known = self._followed[node_id]
        if chunk.head.epoch != known.node.epoch:
            return  # an answer of its earlier or later life; see() will tell
        expected = chunk.head.next_for(known.cursor)
        if chunk.at not in (expected, chunk.head.start()):
            raise RemoteProtocolError(
                f"records: {chunk.at} given, {expected} is what follows {known.cursor}", field="records", value=node_id
            )
        if chunk.at == chunk.head.start() and known.cursor.offset:
            self._reindex(known)
        updates = fold(records_of(chunk.records))
        self._table.add(updates.stored, known.index)
        self._table.remove(updates.removed, known.index)
        known.cursor = chunk.after

    def cursor(self, node_id: str) -> Cursor | None:
        """How far we are with a node that is alive."""
        known = self._followed.get(node_id)
        return known.cursor if known and known.hidden_since_s is None else None

    def hide(self, node_id: str, now_s: float) -> None:
        """The node is not alive as far as is known."""
        known = self._followed.get(node_id)
        if known and known.hidden_since_s is None:
            known.hidden_since_s = now_s
            self._by_index[known.index] = None
            self._show()

    def tidy(self, now_s: float) -> None:
        """Drop who was hidden for long, and free what void entries take."""
        for known in list(self._followed.values()):
            if known.hidden_since_s is not None and now_s - known.hidden_since_s > self._forget_s:
                self._drop(known)
        if self._void:
            self._table.remove_nodes(self._void)
            self._free.extend(self._void)
            self._void.clear()

    def check(self) -> None:
        """Each index is followed, void or free; the table is sound; only who is not hidden is seen."""
        indexes = [known.index for known in self._followed.values()]
        assert sorted([*indexes, *self._void, *self._free]) == list(range(1, MAX_NODE_INDEX + 1))
        seen = {known.node for known in self._followed.values() if known.hidden_since_s is None}
        assert set(self._visible) == seen == {node for node in self._by_index if node}
        self._table.check()

    def _show(self) -> None:
        self._visible = tuple(known.node for known in self._followed.values() if known.hidden_since_s is None)

    def _drop(self, known: _Followed) -> None:
        del self._followed[known.node.node_id]
        self._by_index[known.index] = None
        self._void.add(known.index)
        self._show()

    def _reindex(self, known: _Followed) -> None:
        """Nothing we know of its blocks counts any more."""
        self.num_resyncs += 1
        self._by_index[known.index] = None
        self._void.add(known.index)
        known.index = self._free.pop() if self._free else self._reclaim()
        known.cursor = Cursor()
        self._by_index[known.index] = None if known.hidden_since_s is not None else known.node

    def _reclaim(self) -> int:
        self._table.remove_nodes(self._void)
        self._free.extend(self._void)
        self._void.clear()
        return self._free.pop()
