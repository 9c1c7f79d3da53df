"""Looking at single blocks: what is found by the beginning of a hash, and what is told of it."""

import numpy as np
import pytest
from small_spill import SmallSpill
from small_store import PAGE, SmallStore

from kvstore.core.blocks import Holder
from kvstore.core.errors import ProtocolError
from kvstore.core.limits import INSPECT_SLICE_ROWS
from kvstore.core.plans import FetchPlan, MatchWish
from kvstore.index import BlockIndex
from kvstore.inspect_messages import block_reply, namespace_reply, read_hex
from kvstore.inspection import IndexColumns, Inspector, hottest
from kvstore.labels import Labels
from kvstore.plan_log import PlanRecord

READER = Holder(b"reader..........", 1)


def digits(small: SmallStore, name: str) -> str:
    return small.keys([name])[0].hex()


def put(small: SmallStore, names: str, parent: str = "") -> None:
    grant = small.reserve(READER, names, parent=parent)
    small.store.commit(READER, grant.lease_id, None, 0.0)


def test_a_block_is_told_with_its_place_users_and_neighbours() -> None:
    small = SmallStore()
    put(small, "abc")
    put(small, "x", parent="b")
    grant = small.store.acquire(READER, "read it", small.namespace, small.keys("ab"), 0, 30.0, 5.0)
    inspector = small.store.inspector()

    found = inspector.find(digits(small, "b"), 0)
    told = block_reply(inspector.block(found.rows[0]), [], [b"engine"], [], 5.0)

    assert list(told.pools) == [b"engine"]
    assert (found.num_found, found.next_row) == (1, 0)
    assert (told.key, told.parent, told.position) == (*small.keys("ba"), 1)
    assert sorted(told.children) == sorted(small.keys("cx"))
    assert told.hits == 1
    (copy,) = told.copies
    assert (copy.tier, copy.state, copy.bytes, copy.users) == ("pinned", "ready", PAGE, 1)
    assert copy.offset == grant.slots.offsets[1]
    (lease,) = told.leases
    assert (lease.lease_id, lease.kind, lease.request_id) == (grant.lease_id, "read", "read it")
    assert lease.expires_in_s == pytest.approx(30.0)


def test_copies_of_every_tier_are_told() -> None:
    small = SmallSpill(restored=["n0", "n1"])
    inspector = small.store.inspector()

    view = inspector.block(inspector.find(digits(small, "n1"), 0).rows[0])

    assert [(copy.tier, copy.state) for copy in view.copies] == [("nvme", "ready")]
    assert view.chain == small.keys(["n0", "n1"])


@pytest.mark.parametrize("length", [4, 5, 31])
def test_part_of_a_hash_finds_all_that_begin_so(length: int) -> None:
    """ "ab" and "ac" share four digits' worth of "a." and no more; odd lengths end within a byte."""
    small = SmallStore()
    put(small, ["ab1", "ab2", "xy"])
    wanted = digits(small, "ab1")[:length]

    found = small.store.inspector().find(wanted, 0)

    fits = [name for name in ("ab1", "ab2", "xy") if digits(small, name).startswith(wanted)]
    assert found.num_found == len(fits) >= 1


def test_a_large_index_is_looked_at_in_slices() -> None:
    index = BlockIndex()
    entry = index.open_namespace(b"n" * 16, SmallStore().spec, "", PAGE)
    rows = index.new_rows(INSPECT_SLICE_ROWS + 5)
    index.add(entry, [int(row).to_bytes(16, "big") for row in rows], np.full(len(rows), -1), rows)
    index.forget(int(rows[-1]))  # a free row is nothing that could fit
    inspector = Inspector(index, (), SmallStore().store._leases, Labels(index))

    first = inspector.find("0000", 0)
    last = inspector.find("0000", first.next_row)

    assert (first.num_found, first.next_row) == (INSPECT_SLICE_ROWS, INSPECT_SLICE_ROWS)
    assert (last.num_found, last.next_row) == (4, 0)
    assert len(first.rows) == 8


def test_a_namespace_is_told_with_what_each_tier_has_of_it() -> None:
    small = SmallStore()
    put(small, "abc")

    ((entry, tiers),) = small.store.inspector().namespaces(small.namespace.hex()[:8])
    told = namespace_reply(entry, tiers)

    assert (told.namespace, told.num_rows) == (small.namespace, 3)
    assert [(tier.name, tier.ready_blocks, tier.ready_bytes) for tier in told.tiers] == [("pinned", 3, 3 * PAGE)]


def test_plans_that_found_a_block_are_those_whose_last_block_is_below_it() -> None:
    small = SmallStore()
    put(small, "abc")
    put(small, "x", parent="a")

    def record(last: str, num_found: int, first_needed: int = 0) -> PlanRecord:
        plan = FetchPlan(0, False, 0, 0.0, 0.0, 0.0, 0.0, "test")
        return PlanRecord(
            plan_id=1,
            instance=b"",
            namespace=small.namespace,
            at_s=0.0,
            wish=MatchWish(last, 64, first_needed),
            block_tokens=16,
            block_nbytes=PAGE,
            num_found=num_found,
            tiers=(),
            prefill=None,
            plan=plan,
            last_key=small.keys(last)[0],
        )

    inspector = small.store.inspector()
    view = inspector.block(inspector.find(digits(small, "b"), 0).rows[0])
    records = [record("c", 3), record("x", 2), record("b", 1, 1), record("a", 1), record("g", 5)]

    assert [each.wish.request_id for each in inspector.plans_of(view, records, 5)] == ["c", "b"]
    assert len(inspector.plans_of(view, records, 1)) == 1


def test_the_hottest_prefixes_end_where_readers_part() -> None:
    """0-1-2-3 with a branch 1-4: hits 9 9 5 5 4, and a lone block with 3."""
    parent = np.array([-1, 0, 1, 2, 1, -1], np.int32)
    hits = np.array([9, 9, 5, 5, 4, 3], np.uint32)

    rows = hottest(IndexColumns(parent, hits), 8)

    assert rows.tolist() == [3, 1, 4, 5]  # 5 x 4, 9 x 2, 4 x 3, 3 x 1
    assert hottest(IndexColumns(parent, hits), 2).tolist() == [3, 1]
    assert len(hottest(IndexColumns(parent[:0], hits[:0]), 8)) == 0


def test_hot_prefixes_tell_where_their_blocks_lie() -> None:
    small = SmallStore()
    put(small, "abc")
    small.store.acquire(READER, "", small.namespace, small.keys("ab"), 0, 30.0, 5.0)
    inspector = small.store.inspector()

    (prefix,) = inspector.hot_prefixes(hottest(inspector.columns(), 8).tolist())

    assert (prefix.key, prefix.num_blocks, prefix.hits) == (small.keys("b")[0], 2, 1)
    assert prefix.ready_blocks == {"pinned": 2}
    assert inspector.hot_prefixes([10**6]) == []


@pytest.mark.parametrize("text", ["abc", "xyzw", "", "0" * 65, "ab cd"])
def test_what_is_no_beginning_of_a_hash_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"^hex: .*use 4 to 64 hex digits"):
        read_hex(text)
