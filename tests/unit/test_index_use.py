"""What counts as another use of a block."""

import numpy as np
from small_store import SmallStore, spec

from kvstore.core.blocks import Holder
from kvstore.core.limits import CORRELATED_USE_S
from kvstore.index import NO_PARENT, BlockIndex
from kvstore.replay.cache import block_key


def test_uses_close_together_are_one_and_a_later_one_is_another() -> None:
    index = BlockIndex()
    entry = index.open_namespace(b"n" * 16, spec(), "", 1)
    rows = index.new_rows(1)
    index.add(entry, [block_key(1)], np.array([NO_PARENT]), rows)

    first = index.use(rows, 10.0)
    same = index.use(rows, 10.0 + CORRELATED_USE_S / 2)
    last = index.last_use_at[0]
    later = index.use(rows, 10.0 + 2 * CORRELATED_USE_S)

    assert (len(first), len(same), len(later), index.num_uses, index.uses_at[0]) == (1, 0, 1, 2, 2)
    assert index.prior_use_at[0] == last


def test_a_request_that_looks_leases_and_stores_uses_its_blocks_once() -> None:
    store = SmallStore()
    engine = Holder(b"e" * 16, 1)
    store.put(engine, "ab", now_s=10.0)
    used = store.store._index.num_uses

    store.store.match(store.namespace, store.keys("abc"), 20.0)
    store.acquire(engine, "ab", now_s=20.1)
    store.put(engine, "c", parent="b", now_s=20.5)

    assert store.store._index.num_uses == used + 3


def test_uses_are_counted_up_to_255_and_those_before_a_restart_are_its_hits() -> None:
    index = BlockIndex()
    entry = index.open_namespace(b"n" * 16, spec(), "", 1)
    rows = index.new_rows(3)
    index.add(entry, [block_key(number) for number in range(3)], np.full(3, NO_PARENT), rows)

    index.restore_use(rows, np.array([9, 8, 7]), np.array([0, 3, 1000], np.uint32))
    restored = index.uses[rows].tolist()
    index.use(rows)

    assert restored == [1, 4, 255]
    assert index.uses[rows].tolist() == [2, 5, 255]
