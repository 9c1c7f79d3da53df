"""Which node holds which block: one hash table over all nodes, looked up for 512 keys at once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.transport.directory import Fingerprints

MAX_NODE_INDEX = 0xFFFF
"""Node indexes are 1 to this."""

MAX_SPILLED_HOLDERS = 24
"""Holders of one key kept beside its bucket, which keeps up to eight. More are not taken down: a block that so many nodes
hold (a system prompt) does not want for a source."""

_SLOTS = 8  # entries of a bucket: one cache line
_FIRST_BUCKET_BITS = 8
_MEAN_ENTRIES = 4  # of a bucket, beyond which the table doubles: then some 1 % of the entries spill
_INDEX_MASK = np.uint64(MAX_NODE_INDEX)
_TAG_MASK = ~_INDEX_MASK
_SWEEP_BUCKETS = 1 << 16

NodeIndexes = NDArray[np.uint16]


class Found(NamedTuple):
    """Columns of equal length: the node with index `nodes[i]` holds the key at `positions[i]` of those asked for."""

    positions: NDArray[np.int64]
    nodes: NDArray[np.int64]


class _Buckets(NamedTuple):
    """What a lookup sees at once; replaced whole when the table grows."""

    entries: NDArray[np.uint64]  # [2**bits, 8]
    spilled: NDArray[np.bool_]  # [2**bits]: some of the bucket's entries are in `beside`
    beside: dict[int, tuple[int, ...]]  # tag -> node indexes
    shift: np.uint64  # 64 - bits


class HolderTable:
    """(fingerprint, node index) pairs. One thread changes it, another may look up at any time without a lock.

        entry:  | upper 48 bits of the fingerprint | node index, u16 |      0: empty
                | bucket, `bits` of them | ...     |

    A bucket is a cache line of eight entries; a key's holders are entries of the same bucket with the same upper bits. What
    does not fit lies in a dict beside. At most `_MEAN_ENTRIES` a bucket on average: 16 to 32 bytes an entry. An aligned
    64-bit store is whole for another thread, so a lookup sees an entry or does not. The upper 48 bits of two of n keys
    collide with a probability of n / 2**48: 2e-7 at 60 million entries.

    A Bloom filter for each node would take 1.2 to 3 bytes a block, but 1,000 of them must be asked for each key, and to
    tell 1,000 nodes apart each needs a false-positive rate far below 1 / 1,000; it cannot forget a block either.
    """

    def __init__(self) -> None:
        self.num_entries = 0  # those beside included
        self._buckets = _empty(_FIRST_BUCKET_BITS)

    @property
    def nbytes(self) -> int:
        """Bytes of the table; those beside are counted as 150 each."""
        buckets = self._buckets
        return buckets.entries.nbytes + buckets.spilled.nbytes + 150 * len(buckets.beside)

    def find(self, fingerprints: Fingerprints) -> Found:
        """All holders of each. Any thread; 512 keys take some 60 us."""
        buckets = self._buckets
        tags = fingerprints & _TAG_MASK
        at = fingerprints >> buckets.shift
        rows = buckets.entries[at]
        positions, slots = np.nonzero((rows ^ tags[:, None]) <= _INDEX_MASK)
        nodes = (rows[positions, slots] & _INDEX_MASK).astype(np.int64)
        if buckets.beside and (full := np.flatnonzero(buckets.spilled[at])).size:
            positions, nodes = _with_those_beside(buckets.beside, tags, full, positions, nodes)
        return Found(positions, nodes)

    def add(self, fingerprints: Fingerprints, node: int) -> None:
        """The node holds these; what is there already stays. The changing thread."""
        assert 0 < node <= MAX_NODE_INDEX
        while self.num_entries + len(fingerprints) > _MEAN_ENTRIES * len(self._buckets.entries):
            self._double()
        wanted = np.unique((fingerprints & _TAG_MASK) | np.uint64(node))  # sorted, so in the order of buckets
        self.num_entries += _insert(self._buckets, wanted)

    def remove(self, fingerprints: Fingerprints, node: int) -> None:
        """The node does not hold these any more; what is not there is passed over. The changing thread."""
        buckets = self._buckets
        wanted = np.unique((fingerprints & _TAG_MASK) | np.uint64(node))
        at = wanted >> buckets.shift
        hits, slots = np.nonzero(buckets.entries[at] == wanted[:, None])
        buckets.entries[at[hits], slots] = 0
        self.num_entries -= len(hits)
        absent = np.ones(len(wanted), np.bool_)
        absent[hits] = False
        for entry in wanted[absent & buckets.spilled[at]].tolist():
            self._remove_beside(entry & ~MAX_NODE_INDEX, node)

    def remove_nodes(self, nodes: set[int]) -> None:
        """Nothing of these nodes is left. Looks at the whole table in slices. The changing thread."""
        buckets = self._buckets
        gone = np.zeros(MAX_NODE_INDEX + 1, np.bool_)
        gone[list(nodes)] = True
        gone[0] = False
        for start in range(0, len(buckets.entries), _SWEEP_BUCKETS):
            rows = buckets.entries[start : start + _SWEEP_BUCKETS]
            dead = gone[rows & _INDEX_MASK]
            rows[dead] = 0
            self.num_entries -= int(np.count_nonzero(dead))
        for tag, holders in list(buckets.beside.items()):
            for node in nodes.intersection(holders):
                self._remove_beside(tag, node)

    def check(self) -> None:
        """Entries lie in their buckets, none twice, and are as many as counted."""
        buckets = self._buckets
        at, slots = np.nonzero(buckets.entries)
        entries = buckets.entries[at, slots]
        assert (entries >> buckets.shift == at.astype(np.uint64)).all()
        beside = [tag | node for tag, holders in buckets.beside.items() for node in holders]
        assert all(buckets.spilled[tag >> int(buckets.shift)] for tag in buckets.beside)
        assert all(0 < len(holders) <= MAX_SPILLED_HOLDERS for holders in buckets.beside.values())
        assert len({*entries.tolist(), *beside}) == len(entries) + len(beside) == self.num_entries

    def _remove_beside(self, tag: int, node: int) -> None:
        holders = self._buckets.beside.get(tag, ())
        if node in holders:
            left = tuple(other for other in holders if other != node)
            if left:
                self._buckets.beside[tag] = left
            else:
                del self._buckets.beside[tag]
            self.num_entries -= 1

    def _double(self) -> None:
        """Twice the buckets, filled from the old ones, which lookups use until then."""
        old = self._buckets
        new = _empty(64 - int(old.shift) + 1)
        count = 0
        for start in range(0, len(old.entries), _SWEEP_BUCKETS):
            rows = old.entries[start : start + _SWEEP_BUCKETS]
            count += _insert(new, np.sort(rows[rows != 0]))
        beside = sorted(tag | node for tag, holders in old.beside.items() for node in holders)
        count += _insert(new, np.array(beside, np.uint64))  # at once: of names that are not spread there are many
        self._buckets = new
        self.num_entries = count


def _empty(bits: int) -> _Buckets:
    return _Buckets(np.zeros((1 << bits, _SLOTS), np.uint64), np.zeros(1 << bits, np.bool_), {}, np.uint64(64 - bits))


def _insert(buckets: _Buckets, wanted: NDArray[np.uint64]) -> int:
    """Put sorted distinct entries where they belong, unless they are there. How many are new."""
    at = wanted >> buckets.shift
    present = (buckets.entries[at] == wanted[:, None]).any(axis=1)
    for number in np.flatnonzero(buckets.spilled[at]).tolist():
        entry = int(wanted[number])
        present[number] |= entry & MAX_NODE_INDEX in buckets.beside.get(entry & ~MAX_NODE_INDEX, ())
    wanted, at = wanted[~present], at[~present]
    if not len(wanted):
        return 0
    first = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
    rank = np.arange(len(at)) - np.repeat(first, np.diff(np.r_[first, len(at)]))  # among those of its bucket
    free = buckets.entries[at] == 0
    is_mine = free & (
        np.cumsum(free, axis=1) == rank[:, None] + 1
    )  # the first new entry takes the first free slot, ...
    fits = is_mine.any(axis=1)
    buckets.entries[at[fits], is_mine[fits].argmax(axis=1)] = wanted[fits]
    count = int(np.count_nonzero(fits))
    buckets.spilled[at[~fits]] = True
    for entry in wanted[~fits].tolist():
        tag, node = entry & ~MAX_NODE_INDEX, entry & MAX_NODE_INDEX
        holders = buckets.beside.get(tag, ())
        if node not in holders and len(holders) < MAX_SPILLED_HOLDERS:
            buckets.beside[tag] = (*holders, node)
            count += 1
    return count


def _with_those_beside(
    beside: dict[int, tuple[int, ...]],
    tags: NDArray[np.uint64],
    full: NDArray[np.int64],
    positions: NDArray[np.int64],
    nodes: NDArray[np.int64],
) -> Found:
    """What a lookup found, and what lies beside the buckets that have spilled."""
    more = [
        (position, node)
        for position, tag in zip(full.tolist(), tags[full].tolist(), strict=True)
        for node in beside.get(tag, ())
    ]
    if not more:
        return Found(positions, nodes)
    columns = np.array(more, np.int64)
    return Found(np.concatenate([positions, columns[:, 0]]), np.concatenate([nodes, columns[:, 1]]))
