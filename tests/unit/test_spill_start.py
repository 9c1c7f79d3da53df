"""What the drives had before a restart: found again, in the order in which it was used, or forgotten for good."""

import numpy as np
import pytest
from small_spill import SmallSpill
from small_store import PAGE

from kvstore.core.blocks import Holder
from kvstore.core.moves import MoveProblem

ANNA, BERT = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2)


def test_restored_blocks_are_found_as_soon_as_all_are_there():
    small = SmallSpill(start=False)
    small.restore("ab")
    assert small.match("abc") == 0
    assert small.acquire(ANNA, "abc").lease_id == 0
    small.restore("c", parent="b")

    small.start()

    assert small.tiers_of("abc") == [1, 1, 1]
    assert small.counter("restored_blocks_total") == 3
    assert small.nvme().ready_bytes == 3 * PAGE
    assert small.orders() == []
    assert small.namespaces == [], "the drives know it"
    assert small.open(small.spec) == small.namespace
    assert small.store.open_namespace(small.spec, "").num_blocks == 3


def test_a_long_sequence_whose_first_block_was_dropped_meanwhile_is_given_up_at_once():
    """A pass for each block would take minutes, and meet the test's deadline."""
    small = SmallSpill(num_segments=1, drives=(4000,), start=False)
    small.restore("a")
    small.store.drop(small.namespace, small.keys("a"))
    small.restore([f"k{i}" for i in range(60_000)], parent="a")
    assert small.counter("restored_blocks_total") == 1


def test_a_namespace_that_the_drives_know_is_not_told_again():
    small = SmallSpill(restored="a")
    small.put(ANNA, "b", parent="a")
    assert small.names(small.orders()) == ["b"]
    assert small.namespaces == []


def test_a_restored_block_is_read_under_its_old_checksum_and_generation():
    small = SmallSpill(restored="ab")
    small.acquire(ANNA, "ab")
    records = [move.record for move in small.orders()]
    assert [(record.generation, record.checksum) for record in records] == [(1, 1000), (2, 1001)]


def test_generations_go_on_behind_the_restored_ones():
    small = SmallSpill(restored="abc")
    small.put(ANNA, "x")
    assert small.orders()[0].record.generation == 4


def test_restored_recency_is_what_eviction_goes_by():
    small = SmallSpill(drives=(1,), start=False)
    names = [f"k{i}" for i in range(16)]
    order = np.random.default_rng(5).permutation(16).tolist()
    for name, last_use in zip(names, order, strict=True):
        small.restore([name], last_use=[100 + last_use])
    small.start()

    evicted = []
    for i in range(4):
        small.put(ANNA, [f"new{i}"])
        small.orders()
        evicted += small.names(small.forgets)
        small.settle()

    assert evicted == [names[order.index(i)] for i in range(4)]


def test_restored_hits_are_counted_on_and_new_use_is_newer_than_any_before():
    small = SmallSpill(start=False)
    small.restore("ab", last_use=[900, 800], hits=[7, 3])
    small.start()
    small.acquire(ANNA, "ab")
    touches = {touch.key: touch for touch in small.store.take_touches()}
    a, b = (touches[key] for key in small.keys("ab"))
    assert (a.hits, b.hits) == (8, 4)
    assert a.last_use > b.last_use > 900


def test_a_block_that_was_stored_again_meanwhile_has_both_copies():
    small = SmallSpill(start=False)
    small.put(ANNA, "ab")
    small.restore("abc")
    small.start()
    assert small.tiers_of("abc") == [0, 0, 1]
    assert small.orders() == [], "nothing to write"


def test_a_child_that_was_stored_meanwhile_is_written_behind_its_restored_parent():
    small = SmallSpill(start=False)
    small.restore("a")
    small.put(ANNA, "b", parent="a")
    small.restore("x")
    small.start()
    assert small.names(small.orders()) == ["b"]
    assert small.tiers_of("ab") == [1, 0]


@pytest.mark.parametrize("drop_all", [False, True])
def test_a_drop_meanwhile_takes_what_was_restored_before_it_and_what_comes_after(drop_all: bool):
    small = SmallSpill(start=False)
    small.restore("abc")
    small.restore("x")
    assert small.store.drop(small.namespace, None if drop_all else small.keys("b")) == (4 if drop_all else 2)
    small.restore("de", parent="c")
    small.restore("y")
    small.start()

    dropped = set("abcdexy") if drop_all else set("bcde")
    assert small.match("abcde") == (0 if drop_all else 1)
    assert (small.match("x"), small.match("y")) == ((0, 0) if drop_all else (1, 1))
    small.orders()
    assert set(small.names(small.forgets)) == dropped
    assert {forget.problem for forget in small.forgets} == {None}
    assert small.nvme().limbo_bytes == len(dropped) * PAGE
    small.commit_index()
    assert small.nvme().limbo_bytes == 0
    assert small.nvme().free_bytes == small.nvme().capacity_bytes - (7 - len(dropped)) * PAGE


def test_a_drop_meanwhile_counts_again_nothing():
    small = SmallSpill(start=False)
    small.restore("ab")
    small.store.drop(small.namespace, small.keys("a"))
    small.start()
    assert small.counter("dropped_blocks_total") == 2


def test_a_block_without_its_parent_is_forgotten_and_its_slot_comes_back():
    small = SmallSpill(drives=(1,), start=False)
    small.restore("ab")
    small.restore("cd", parent="gone")
    small.restore("e", parent="d")
    small.start()

    assert (small.match("ab"), small.match("cde")) == (2, 0)
    small.orders()
    assert small.names(small.forgets) == ["c", "d", "e"]
    assert [forget.generation for forget in small.forgets] == [3, 4, 5]
    assert small.counter("restored_blocks_total") == 2
    offsets = {forget.offset for forget in small.forgets}
    names = [f"k{i}" for i in range(11)]
    small.put(ANNA, names)
    assert not offsets & {move.record.offset for move in small.orders()}
    small.commit_index()
    small.put(ANNA, "xyz")
    assert {move.record.offset for move in small.orders()} == offsets


def test_in_one_slice_only_those_are_forgotten_that_hang_on_what_is_missing():
    """Three sequences, each in its order, the second behind a parent that is not known."""
    small = SmallSpill(start=False)
    small.restore("t")
    small.restore("arbscx", parents=["t", "gone", "a", "r", "b", ""])
    small.start()
    small.orders()
    assert small.names(small.forgets) == ["r", "s"]
    assert (small.match("tabc"), small.match("x"), small.match("rs")) == (4, 1, 0)
    assert small.counter("restored_blocks_total") == 5


def test_a_quarantined_slot_stays_unused():
    small = SmallSpill(drives=(1,), start=False)
    small.restore("a")
    small.store.restore_quarantined(5 * PAGE, PAGE)
    small.start()

    nvme = small.nvme()
    assert (nvme.quarantined_bytes, nvme.limbo_bytes, nvme.free_bytes) == (PAGE, 0, 14 * PAGE)
    assert small.orders() == []
    assert small.forgets == [], "the drive knows"
    small.put(ANNA, [f"k{i}" for i in range(14)])
    assert 5 * PAGE not in {move.record.offset for move in small.orders()}


def test_restored_blocks_can_be_given_up_but_not_the_head_before_its_tail():
    small = SmallSpill(drives=(1,), start=False)
    small.restore([f"k{i}" for i in range(16)], last_use=list(range(16)))
    small.start()
    small.put(ANNA, "x")
    small.orders()
    assert small.names(small.forgets) == ["k15"]


def test_what_was_restored_is_not_written_down_again():
    small = SmallSpill(start=False)
    small.restore("ab", last_use=[900, 800])
    small.start()
    assert small.store.take_touches() == []


def test_a_restored_block_that_proves_bad_goes_as_any_other():
    small = SmallSpill(restored="ab")
    small.acquire(ANNA, "ab")
    small.finish(small.orders(), MoveProblem.CHECKSUM)
    small.orders()
    assert [(forget.generation, forget.problem) for forget in small.forgets] == [(1, "checksum"), (2, "checksum")]
    assert small.nvme().quarantined_bytes == 2 * PAGE


def test_drops_meanwhile_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch):
    """Beyond the limit the whole namespace is dropped once more; the others are not."""
    monkeypatch.setattr("kvstore.store.MAX_KEYS_PER_CALL", 3)
    small = SmallSpill(start=False)
    for name in ("p", "q", "r", "s"):
        small.store.drop(small.namespace, small.keys([name]))
    small.restore("ab")
    small.start()
    assert small.match("ab") == 0


def test_a_drop_meanwhile_of_a_namespace_that_was_closed_is_over():
    small = SmallSpill(start=False)
    small.store.drop(small.namespace, small.keys("a"))
    small.store._index.close_unused(())
    small.start()
    assert small.store.stats().num_namespaces == 0
