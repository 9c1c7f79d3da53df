"""What is known of single blocks: where they lie, who uses them, what is before and behind them. Changes nothing."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import PlacementState
from kvstore.core.limits import INSPECT_SLICE_ROWS, MAX_INSPECTED_BLOCKS
from kvstore.index import KEPT, MORTAL, NO_PARENT, BlockIndex, Namespace, Rows
from kvstore.labels import Labels
from kvstore.leases import Lease, LeaseTable
from kvstore.placements import NONE, PlacementTable
from kvstore.plan_log import PlanRecord

_MAX_CHILDREN = 16  # told of one block
_MAX_STEPS = 100_000  # up the tree, to find the plans of one block; some 10 ms


class Found(NamedTuple):
    """Blocks of a slice of the index whose hash begins as asked. `next_row` 0: the index ends here."""

    rows: list[int]  # at most MAX_INSPECTED_BLOCKS
    num_found: int
    next_row: int


class Copy(NamedTuple):
    """A block's copy in one tier."""

    tier: str
    state: str
    offset: int
    nbytes: int
    generation: int
    users: int


class BlockView(NamedTuple):
    """One block as it is now."""

    namespace: bytes
    chain: list[bytes]  # keys from the first block of the sequence to this one
    children: list[bytes]  # some of them
    num_children: int
    hits: int
    num_uses_since: int  # blocks touched since this one was
    pinned: bool
    mortal: bool
    label: str
    copies: list[Copy]
    leases: list[Lease]


class TierContents(NamedTuple):
    """Blocks of one namespace in a tier, by state."""

    tier: str
    counts: list[int]  # by PlacementState


class IndexColumns(NamedTuple):
    """Copies of the columns that say which prefixes are hot. Free rows have no parent and no hits."""

    parent: NDArray[np.int32]
    hits: NDArray[np.uint32]


class HotPrefix(NamedTuple):
    """A prefix that readers were given often."""

    namespace: bytes
    tenant: str
    model: str
    label: str  # of its last block
    key: bytes  # of it
    num_blocks: int
    block_tokens: int
    hits: int  # of its last block
    ready_blocks: dict[str, int]  # by tier


class Inspector:
    """Looks at a store's parts (store.Store.inspector). Loop thread only."""

    def __init__(
        self, index: BlockIndex, tiers: tuple[PlacementTable, ...], leases: LeaseTable, labels: Labels
    ) -> None:
        self._labels = labels
        self._index = index
        self._tiers = tiers
        self._leases = leases

    def find(self, hex_digits: str, first_row: int) -> Found:
        """Blocks among the INSPECT_SLICE_ROWS rows from `first_row` on. A whole hash is looked up at once."""
        index = self._index
        whole, odd = bytes.fromhex(hex_digits[: len(hex_digits) // 2 * 2]), len(hex_digits) % 2
        if not odd and len(whole) >= 16:
            rows = [row for entry in index.namespaces if (row := entry.rows.get(whole, NO_PARENT)) != NO_PARENT]
            if rows:
                return Found(rows[:MAX_INSPECTED_BLOCKS], len(rows), 0)
        end = min(first_row + INSPECT_SLICE_ROWS, index.num_rows)
        rows = [row for row, key in enumerate(index.keys[first_row:end], first_row) if key.startswith(whole) and key]
        if odd:
            rows = [row for row in rows if index.keys[row].hex().startswith(hex_digits)]
        return Found(rows[:MAX_INSPECTED_BLOCKS], len(rows), end if end < index.num_rows else 0)

    def namespaces(self, hex_digits: str) -> list[tuple[Namespace, list[TierContents]]]:
        """Open namespaces whose id begins so, and what each tier has of them."""
        return [
            (entry, [TierContents(table.tier, list(table.counts[entry.number])) for table in self._tiers])
            for entry in self._index.namespaces
            if entry.namespace.hex().startswith(hex_digits) and self._index.find_namespace(entry.namespace) is entry
        ]

    def block(self, row: int) -> BlockView:
        """What is known of a row."""
        index = self._index
        entry = index.namespace_of(row)
        marks = index.marks_at[row]
        children: list[int] = []
        if index.num_children_at[row]:
            children = np.flatnonzero(index.parent[: index.num_rows] == row)[:_MAX_CHILDREN].tolist()
        return BlockView(
            namespace=entry.namespace,
            chain=[index.keys[each] for each in self.path(row)],
            children=[index.keys[child] for child in children],
            num_children=index.num_children_at[row],
            hits=index.hits_at[row],
            num_uses_since=index.sequence - index.last_use_at[row],
            pinned=bool(marks & KEPT),
            mortal=bool(marks & MORTAL),
            label=self._labels.of(row),
            copies=[_copy(table, row) for table in self._tiers if table.state_at[row] != NONE],
            leases=[lease for lease in self._leases.all_leases() if (lease.rows[lease.pending] == row).any()],
        )

    def path(self, row: int) -> list[int]:
        """Rows from the first block of the sequence to this one."""
        path = [row]
        while (row := self._index.parent_at[row]) != NO_PARENT:
            path.append(row)
        return path[::-1]

    def plans_of(self, view: BlockView, records: Iterable[PlanRecord], limit: int) -> list[PlanRecord]:
        """Those of `records`, which are of the block's namespace, that found it: the last block they found is below it. A
        plan whose last block is forgotten by now is not found, nor any past some work."""
        entry = self._index.find_namespace(view.namespace)
        assert entry is not None
        target, position = entry.rows[view.chain[-1]], len(view.chain) - 1
        found: list[PlanRecord] = []
        below: dict[int, bool] = {}  # by last row
        steps = 0
        for record in records:
            row = entry.rows.get(record.last_key, NO_PARENT)
            up = record.wish.first_needed + record.num_found - 1 - position
            if row == NO_PARENT or up < 0:
                continue
            if row not in below:
                steps += up
                below[row] = self._ancestor(row, up) == target
            if below[row]:
                found.append(record)
            if len(found) == limit or steps > _MAX_STEPS:
                break
        return found

    def columns(self) -> IndexColumns:
        """For `hottest`, on another thread: 3 ms for a million rows."""
        index, end = self._index, self._index.num_rows
        return IndexColumns(index.parent[:end].copy(), index.hits[:end].copy())

    def hot_prefixes(self, rows: Iterable[int]) -> list[HotPrefix]:
        """Rows that were hot a moment ago, as they are now."""
        return [self._hot_prefix(row) for row in rows if row < self._index.num_rows and self._index.keys[row]]

    def _hot_prefix(self, row: int) -> HotPrefix:
        entry, path = self._index.namespace_of(row), np.array(self.path(row), np.int64)
        ready = {table.tier: int(np.count_nonzero(table.state[path] == PlacementState.READY)) for table in self._tiers}
        return HotPrefix(
            namespace=entry.namespace,
            tenant=entry.tenant,
            model=entry.spec.weights,
            label=self._labels.of(row),
            key=self._index.keys[row],
            num_blocks=len(path),
            block_tokens=entry.spec.block_tokens,
            hits=self._index.hits_at[row],
            ready_blocks=ready,
        )

    def _ancestor(self, row: int, up: int) -> int:
        for _ in range(up):
            if row == NO_PARENT:
                break
            row = self._index.parent_at[row]
        return row


def hottest(columns: IndexColumns, count: int) -> Rows:
    """The rows whose prefixes saved most: by hits times blocks. A prefix ends where readers part: at a block with more hits
    than any of its children. Any thread."""
    parent, hits = columns.parent, columns.hits
    most = np.zeros(len(hits), np.uint32)
    inner = parent != NO_PARENT
    np.maximum.at(most, parent[inner], hits[inner])
    ends = np.flatnonzero(hits > most)
    ends = ends[np.argsort(hits[ends])[::-1][: 16 * count]]
    position = np.ones(len(ends), np.int64)
    above = parent[ends].astype(np.int64)
    while (above != NO_PARENT).any():
        position += above != NO_PARENT
        above = np.where(above != NO_PARENT, parent[above], NO_PARENT)
    order = np.argsort(hits[ends] * position, kind="stable")[::-1]
    return ends[order[:count]]


def _copy(table: PlacementTable, row: int) -> Copy:
    extent = table.extent(row)
    state = PlacementState(table.state_at[row]).name.lower()
    return Copy(table.tier, state, extent.offset, extent.nbytes, extent.generation, table.refs_at[row])
