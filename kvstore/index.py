"""Which blocks are known: for each namespace a dict from prefix hash to row, everything else in columns by row."""

import math
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keys import KVSpec
from kvstore.core.limits import CORRELATED_USE_S

Rows = NDArray[np.int64]
"""Row numbers, in the order of the keys they stand for."""

_T = TypeVar("_T", bound=np.generic)

NO_PARENT = -1
NO_ROWS: Rows = np.empty(0, np.int64)

KEPT, MORTAL = 1, 2
"""Marks of a row (pins.py): not to be evicted; has a time to live, and goes to no slower tier."""

_FIRST_CAPACITY = 1024
_MOST_USES = 255


class Namespace(NamedTuple):
    """An open namespace. `rows` maps prefix hash to row; `slot_nbytes` is what one of its blocks takes in a tier."""

    number: int
    namespace: bytes
    spec: KVSpec
    tenant: str
    slot_nbytes: int
    rows: dict[bytes, int]


def _likeness(tenant: str, spec: KVSpec) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What namespaces share that might have been meant for each other: the weights or the shape, within a tenant and a layer
    group. The groups of one model differ on purpose."""
    return (
        (tenant, spec.group, spec.weights),
        (tenant, spec.group, spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.planes),
    )


class BlockIndex:
    """The tree of known blocks, whatever tier they lie in.

        row       | parent | namespace | num_children | num_placed | last_use | hits | key
        0         | -1     | 0         | 1            | 1          | 17       | 2    | 9a41...
        1         | 0      | 0         | 0            | 1          | 16       | 2    | 03bb...

    A row lives while it is placed in a tier or has children. One that only has children is a ghost: its block was
    aborted or dropped, and when it is stored again, its children are found behind it again. `last_use` is a logical
    clock; `touch` goes from tail to head, so that a parent is always more recent than its children in the same call.
    `prior_use` is the use before the last one, 0: there was none (eviction/lru.py).

    A dict of objects per block cost 290 B and gc pauses of a second at 10 M blocks; numpy probing of a hash table was six
    times slower than the dict's own 512 look-ups. Columns are numpy for a call's 512 keys at once, and the same memory
    as a memoryview (`..._at`) for single rows, which reads twice as fast as numpy's scalars.
    """

    def __init__(self, *, first_sequence: int = 0) -> None:
        self.namespaces: list[Namespace] = []  # by number; a closed one stays until its number is given to another
        self.keys: list[bytes] = []  # by row; b"" in a free row
        self.num_rows = 0
        self._by_id: dict[bytes, Namespace] = {}
        self._free_numbers: list[int] = []
        self._alike: dict[tuple[object, ...], dict[bytes, Namespace]] = {}  # by likeness, then by id
        self._free_rows: list[int] = []
        self._sequence = first_sequence
        self.num_uses = 0  # that `use` has counted
        self._capacity = 0
        self.parent = np.empty(0, np.int32)
        self.namespace = np.empty(0, np.uint16)
        self.num_children = np.empty(0, np.int32)
        self.num_placed = np.empty(0, np.uint8)
        self.last_use = np.empty(0, np.int64)
        self.prior_use = np.empty(0, np.int64)
        self.uses = np.empty(0, np.uint8)  # that `use` has counted; 255: or more
        self.counted_s = np.empty(0, np.float32)  # when `use` last took a row's use for another one
        self.hits = np.empty(0, np.uint32)
        self.marks = np.empty(0, np.uint8)
        self.label = np.empty(0, np.uint16)  # labels.py
        self._grow(_FIRST_CAPACITY)

    @property
    def capacity(self) -> int:
        """Length of the columns; tables that have columns by row grow with it."""
        return self._capacity

    @property
    def num_blocks(self) -> int:
        """Rows in use, ghosts among them."""
        return self.num_rows - len(self._free_rows)

    @property
    def sequence(self) -> int:
        """The logical time: of the last use of any row."""
        return self._sequence

    @property
    def num_namespaces(self) -> int:
        """Open ones."""
        return len(self._by_id)

    def find_namespace(self, namespace: bytes) -> Namespace | None:
        """The open namespace of that id."""
        return self._by_id.get(namespace)

    def open_namespace(self, namespace: bytes, spec: KVSpec, tenant: str, slot_nbytes: int) -> Namespace:
        """Add a namespace that is not there yet."""
        assert namespace not in self._by_id
        number = self._free_numbers.pop() if self._free_numbers else len(self.namespaces)
        entry = Namespace(number, namespace, spec, tenant, slot_nbytes, {})
        self.namespaces[number : number + 1] = [entry]  # at the end: one more
        self._by_id[namespace] = entry
        for likeness in _likeness(tenant, spec):
            self._alike.setdefault(likeness, {})[namespace] = entry
        return entry

    def close_unused(self, in_use: Collection[bytes]) -> int:
        """Close the namespaces that have no rows and are not `in_use`; how many."""
        unused = [entry for entry in self._by_id.values() if not entry.rows and entry.namespace not in in_use]
        for entry in unused:
            del self._by_id[entry.namespace]
            for likeness in _likeness(entry.tenant, entry.spec):
                del self._alike[likeness][entry.namespace]
                if not self._alike[likeness]:
                    del self._alike[likeness]
            self._free_numbers.append(entry.number)
        return len(unused)

    def alike(self, entry: Namespace) -> list[Namespace]:
        """The tenant's other namespaces of the same layer group with the same weights or the same shape."""
        weights, shape = _likeness(entry.tenant, entry.spec)
        found = self._alike[weights] | self._alike[shape]
        del found[entry.namespace]
        return list(found.values())

    def namespace_of(self, row: int) -> Namespace:
        """The namespace a row belongs to."""
        return self.namespaces[self.namespace_at[row]]

    def find_prefix(self, namespace: Namespace, keys: Sequence[bytes]) -> Rows:
        """Rows of the keys before the first unknown one."""
        rows = self.find_all(namespace, keys)
        unknown = rows < 0
        return rows[: int(unknown.argmax())] if unknown.any() else rows

    def find_all(self, namespace: Namespace, keys: Sequence[bytes]) -> Rows:
        """A row for each key, -1 where it is unknown."""
        return np.fromiter(map(namespace.rows.get, keys, repeat(-1)), np.int64, len(keys))  # half the time of a loop

    def add(self, namespace: Namespace, keys: Sequence[bytes], parents: Rows, rows: Rows) -> None:
        """Make `rows` (from `new_rows`) the blocks `keys` with these parents, which may be among `rows`."""
        numbers = rows.tolist()
        for key, row in zip(keys, numbers, strict=True):
            self.keys[row] = key
        namespace.rows.update(zip(keys, numbers, strict=True))
        self.namespace[rows] = namespace.number
        self.parent[rows] = parents
        np.add.at(self.num_children, parents[parents >= 0], 1)

    def new_rows(self, count: int) -> Rows:
        """Row numbers for `add`: freed ones first."""
        reused = self._free_rows[max(0, len(self._free_rows) - count) :] if count else []
        if reused:
            del self._free_rows[-len(reused) :]
        first, self.num_rows = self.num_rows, self.num_rows + count - len(reused)
        if self.num_rows > self._capacity:
            self._grow(max(2 * self._capacity, self.num_rows))
        self.keys.extend([b""] * (self.num_rows - first))
        return np.array([*reused, *range(first, self.num_rows)], np.int64)

    def touch(self, rows: Rows) -> None:
        """Mark as just used, tail to head."""
        last = self._sequence + len(rows)
        self.last_use[rows] = np.arange(last, self._sequence, -1)
        self._sequence = last

    def use(self, rows: Rows, now_s: float = math.inf) -> Rows:
        """Touch what a request uses; returns the rows for which this is another use than their last one. Within
        CORRELATED_USE_S of a use that counted it is none: a request looks, leases and stores, or waits and looks again."""
        fresh = rows[now_s - self.counted_s[rows] >= CORRELATED_USE_S]
        again = fresh[self.last_use[fresh] > 0]  # pages of the column that hold no use before the last take no memory
        self.prior_use[again] = self.last_use[again]
        self.uses[fresh] = np.minimum(self.uses[fresh], _MOST_USES - 1) + 1
        if now_s < math.inf:
            self.counted_s[fresh] = now_s
        self.touch(rows)
        self.num_uses += len(fresh)
        return fresh

    def restore_use(self, rows: Rows, last_use: NDArray[np.int64], hits: NDArray[np.uint32]) -> None:
        """Recency and hits from before a restart, where they are newer than what is known."""
        self.last_use[rows] = np.maximum(self.last_use[rows], last_use)
        self.hits[rows] = np.maximum(self.hits[rows], hits)
        uses = np.minimum(self.hits[rows], _MOST_USES - 1).astype(np.uint8) + 1
        self.uses[rows] = np.maximum(self.uses[rows], uses)
        again = rows[(hits > 0) & (self.prior_use[rows] == 0)]
        self.prior_use[again] = self.last_use[again]  # when it was, nobody wrote down
        if len(rows):
            self._sequence = max(self._sequence, int(last_use.max()))

    def used_since(self, sequence: int) -> Rows:
        """Rows touched after the logical time `sequence` (see `sequence`)."""
        return np.flatnonzero(self.last_use[: self.num_rows] > sequence)

    def forget(self, row: int) -> None:
        """Remove a row that is neither placed nor a parent, and the ghosts that only it kept. Others stay, free rows too."""
        while row != NO_PARENT and self.keys[row] and not self.num_placed_at[row] and not self.num_children_at[row]:
            parent = self.parent_at[row]
            del self.namespace_of(row).rows[self.keys[row]]
            self._clear(row)
            if parent != NO_PARENT:
                self.num_children_at[parent] -= 1
            row = parent

    def forget_dead(self, rows: Rows) -> None:
        """Remove those of `rows`, which have every descendant of their members, at or below which nothing is placed; and the
        ghosts above that only they kept. Fast for a million rows."""
        survives = np.zeros(self._capacity, np.bool_)
        for placed in rows[self.num_placed[rows] > 0].tolist():
            row = placed
            while row != NO_PARENT and not survives[row]:
                survives[row] = True
                row = self.parent_at[row]
        dead = rows[~survives[rows]]
        inside = np.zeros(self._capacity, np.bool_)
        inside[dead] = True
        parents = self.parent[dead]
        outer = parents[(parents != NO_PARENT) & ~inside[parents]].tolist()
        self._forget_subtrees(dead)
        for row in outer:
            self.forget(row)

    def _forget_subtrees(self, rows: Rows) -> None:
        """Remove rows of one namespace that are not placed and whose children are all among them."""
        assert not self.num_placed[rows].any()
        parents = self.parent[rows]
        np.subtract.at(self.num_children, parents[parents != NO_PARENT], 1)
        assert not self.num_children[rows].any()
        numbers = rows.tolist()
        known = self.namespace_of(numbers[0]).rows if numbers else {}
        for row in numbers:
            del known[self.keys[row]]
            self.keys[row] = b""
        self.parent[rows] = NO_PARENT
        self.hits[rows] = 0
        self.last_use[rows] = 0
        self.prior_use[rows] = 0
        self.uses[rows] = 0
        self.counted_s[rows] = -math.inf
        self.marks[rows] = 0
        self.label[rows] = 0
        self._free_rows.extend(numbers)

    def with_descendants(self, rows: Rows) -> Rows:
        """`rows`, distinct, and every row below them. O(all rows x log depth) where there are any, by pointer doubling; for
        drop, which is rare."""
        if not self.num_children[rows].any():
            return rows
        inside = np.zeros(self.num_rows + 1, np.bool_)  # one more, so that NO_PARENT (-1) finds False
        inside[rows] = True
        ancestor = np.append(self.parent[: self.num_rows].astype(np.int64), NO_PARENT)
        while (ancestor != NO_PARENT).any():
            inside |= inside[ancestor]
            ancestor = ancestor[ancestor]
        return np.flatnonzero(inside)

    def rows_of(self, namespace: Namespace) -> Rows:
        """Every row of a namespace."""
        return np.fromiter(namespace.rows.values(), np.int64, len(namespace.rows))

    def check(self) -> None:
        """Dict and rows agree, children are counted, every ghost has a child, free rows are blank."""
        known = [(entry, key, row) for entry in self.namespaces for key, row in entry.rows.items()]
        used = np.array([row for _, _, row in known], np.int64)
        assert len(np.unique(used)) == len(used) == self.num_blocks
        assert sorted([*self._free_numbers, *(entry.number for entry in self._by_id.values())]) == list(
            range(len(self.namespaces))
        )
        assert all(self.namespaces[entry.number] is entry for entry in self._by_id.values())
        assert not any(self.namespaces[number].rows for number in self._free_numbers)
        assert all(self._alike.values())
        for likeness, entries in self._alike.items():
            for namespace, entry in entries.items():
                assert self._by_id[namespace] is entry
                assert likeness in _likeness(entry.tenant, entry.spec)
        assert sum(map(len, self._alike.values())) == 2 * len(self._by_id)
        assert not set(self._free_rows) & set(used.tolist())
        assert len(set(self._free_rows)) == len(self._free_rows)
        assert all(self.keys[row] == key and self.namespace_at[row] == entry.number for entry, key, row in known)
        assert len(self.keys) == self.num_rows <= self._capacity
        parents = self.parent[used]
        assert np.isin(parents[parents != NO_PARENT], used).all()
        assert (self.namespace[parents] == self.namespace[used])[parents != NO_PARENT].all()
        counted = np.zeros(self._capacity, np.int64)
        np.add.at(counted, parents[parents != NO_PARENT], 1)
        assert (counted == self.num_children).all()
        assert ((self.num_placed[used] > 0) | (self.num_children[used] > 0)).all()
        for row in self._free_rows:
            assert self.keys[row] == b""
            assert self.num_placed_at[row] == 0

    def _clear(self, row: int) -> None:
        self.keys[row] = b""
        self.parent_at[row] = NO_PARENT
        self.hits_at[row] = 0
        self.last_use_at[row] = 0
        self.prior_use_at[row] = 0
        self.uses_at[row] = 0
        self.counted_s[row] = -math.inf
        self.marks_at[row] = 0
        self.label[row] = 0
        self._free_rows.append(row)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self.parent = grown(self.parent, capacity)
        self.namespace = grown(self.namespace, capacity)
        self.num_children = grown(self.num_children, capacity)
        self.num_placed = grown(self.num_placed, capacity)
        self.last_use = grown(self.last_use, capacity)
        self.prior_use = grown(self.prior_use, capacity)
        self.uses = grown(self.uses, capacity)
        self.counted_s = grown(self.counted_s, capacity)
        self.hits = grown(self.hits, capacity)
        self.marks = grown(self.marks, capacity)
        self.label = grown(self.label, capacity)
        self.parent_at = self.parent.data
        self.namespace_at = self.namespace.data
        self.num_children_at = self.num_children.data
        self.num_placed_at = self.num_placed.data
        self.last_use_at = self.last_use.data
        self.prior_use_at = self.prior_use.data
        self.uses_at = self.uses.data
        self.hits_at = self.hits.data
        self.marks_at = self.marks.data


def grown(column: NDArray[_T], capacity: int) -> NDArray[_T]:
    """A longer copy of a column, zero beyond the old end. A column without a value takes no memory: the kernel lends it a
    page when it is written to."""
    longer = np.zeros(capacity, column.dtype)
    if column.any():
        longer[: len(column)] = column
    return longer
