"""Wishes about blocks: keep them for a while, let them go first, be rid of them by a certain time."""

import pytest
from small_spill import SmallSpill
from small_store import PAGE, SmallStore

from kvstore.core.blocks import Holder
from kvstore.core.limits import MAX_PINNED_FRACTION

ANNA = Holder(b"anna" * 4, 1)
BLOCKS = 64  # that the small arena has room for


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(count)]


def fill(store: SmallStore, letter: str, count: int = BLOCKS, now_s: float = 0.0) -> None:
    """Push out whatever can be, in single blocks that follow nothing."""
    for name in names(letter, count):
        store.put(ANNA, [name], now_s=now_s)


def pin(store: SmallStore, wanted: list[str], pin_s: float, now_s: float = 0.0) -> int:
    count = store.store.pin(store.namespace, store.keys(wanted), pin_s, now_s)
    store.store.check()
    return count


def cool(store: SmallStore, wanted: list[str]) -> int:
    count = store.store.cool(store.namespace, store.keys(wanted), 0.0)
    store.store.check()
    return count


def test_a_pinned_prefix_outlives_a_flood_until_its_time_is_over():
    store = SmallStore()
    store.put(ANNA, names("a", 4))
    assert pin(store, names("a", 4), 10.0) == 4

    fill(store, "b")
    assert store.match(names("a", 4)) == 4

    assert store.store.next_expiry_s() == 10.0
    store.store.expire(10.0)
    fill(store, "c")
    assert store.match(names("a", 4)) == 0


def test_unpinned_blocks_go_like_any_other():
    store = SmallStore()
    store.put(ANNA, names("a", 4))
    pin(store, names("a", 4), 10.0)
    pin(store, names("a", 4), 0.0)
    fill(store, "b")
    assert store.match(names("a", 4)) == 0


def test_the_last_pin_sets_the_time_also_to_an_earlier_one():
    store = SmallStore()
    store.put(ANNA, names("a", 2))
    pin(store, names("a", 2), 100.0)
    pin(store, names("a", 2), 5.0)
    store.store.expire(5.0)
    fill(store, "b", now_s=5.0)
    assert store.match(names("a", 2)) == 0
    pin(store, names("b", 1), 1.0, now_s=5.0)
    store.store.expire(200.0)  # the time of the first pin finds nothing
    store.store.check()


def test_pins_together_keep_a_part_of_the_arena_and_no_more():
    store = SmallStore()
    most = int(MAX_PINNED_FRACTION * BLOCKS)
    store.put(ANNA, names("a", most - 2))
    store.put(ANNA, names("b", 8))
    assert pin(store, names("a", most - 2), 10.0) == most - 2
    assert pin(store, names("b", 8), 10.0) == 2
    assert pin(store, names("b", 8), 20.0) == 2  # the same two again
    fill(store, "c")
    assert store.match(names("b", 8)) == 2


def test_room_comes_back_when_what_was_pinned_is_dropped():
    store = SmallStore()
    most = int(MAX_PINNED_FRACTION * BLOCKS)
    store.put(ANNA, names("a", most))
    pin(store, names("a", most), 10.0)
    store.store.drop(store.namespace, store.keys(["a0"]))
    store.store.check()
    store.put(ANNA, names("b", most))
    assert pin(store, names("b", most), 20.0) == most
    store.store.expire(10.0)  # the rows are other blocks now: their pins hold
    store.store.check()
    fill(store, "c")
    assert store.match(names("b", most)) == most


def test_a_pin_keeps_blocks_on_a_drive_too():
    spill = SmallSpill(drives=(1,), restored=names("a", 4))
    assert pin(spill, names("a", 4), 10.0) == 4
    for name in names("b", 40):
        spill.put(ANNA, [name])
        spill.settle()
    assert spill.match(names("a", 4)) == 4
    assert spill.counter("nvme_evicted_blocks_total") > 0


def test_cooled_blocks_go_first_and_tail_first():
    store = SmallStore()
    fill(store, "b", BLOCKS - 4)
    store.put(ANNA, names("a", 4))
    assert cool(store, names("a", 4)) == 4

    fill(store, "c", 2)

    assert store.match(names("a", 4)) == 2
    assert store.match(["b0"]) == 1


def test_cooled_blocks_that_are_used_again_are_like_any_other():
    store = SmallStore()
    fill(store, "b", BLOCKS - 4)
    store.put(ANNA, names("a", 4))
    cool(store, names("a", 4))
    store.match(names("a", 4))

    fill(store, "c", 4)

    assert store.match(names("a", 4)) == 4
    assert store.match(["b0"]) == 0


def test_cooling_ends_a_pin_and_spares_what_others_share():
    store = SmallStore()
    store.put(ANNA, ["a0", "a1", "x"])
    store.put(ANNA, ["a0", "a1", "y"])
    pin(store, ["a0", "a1", "x"], 100.0)
    cool(store, ["a0", "a1", "x"])
    fill(store, "b", BLOCKS - 3)
    assert store.match(["a0", "a1", "x"]) == 2
    assert store.match(["a0", "a1", "y"]) == 3


def test_a_block_with_a_time_to_live_is_gone_when_it_is_over():
    store = SmallStore()
    grant = store.store.reserve(ANNA, "r", store.namespace, b"", store.keys(names("a", 3)), 30.0, 0.0, keep_s=5.0)
    store.store.commit(ANNA, grant.lease_id, None, 0.0)
    assert store.store.next_expiry_s() == 5.0
    store.put(ANNA, ["a3"], parent="a2")  # built on it, without a time of its own
    store.store.expire(4.9)
    assert store.match([*names("a", 3), "a3"]) == 4

    store.store.expire(5.0)

    store.store.check()
    assert store.match([*names("a", 3), "a3"]) == 0
    assert store.counter("outlived_blocks_total") == 4


def test_blocks_that_others_had_stored_before_get_no_time_to_live():
    store = SmallStore()
    store.put(ANNA, names("a", 2))
    grant = store.store.reserve(ANNA, "r", store.namespace, b"", store.keys(names("a", 4)), 30.0, 0.0, keep_s=5.0)
    store.store.commit(ANNA, grant.lease_id, None, 0.0)
    store.store.expire(5.0)
    assert store.match(names("a", 4)) == 2


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_blocks_with_a_time_to_live_and_what_follows_them_go_to_no_drive(policy: str):
    spill = SmallSpill(write_policy=policy)
    spill.put(ANNA, names("a", 2))
    grant = spill.store.reserve(
        ANNA, "r", spill.namespace, spill.keys(["a1"])[0], spill.keys(names("m", 2)), 30.0, 0.0, keep_s=5.0
    )
    spill.store.commit(ANNA, grant.lease_id, None, 0.0)
    spill.put(ANNA, ["z"], parent="m1")
    for _ in range(3):
        spill.store.tick(0.0)
        spill.settle()
    on_drives = spill.store.stats().tiers[1].ready_blocks
    assert on_drives == (2 if policy == "write_through" else 0)
    spill.store.expire(5.0)
    spill.store.check()
    assert spill.match([*names("a", 2), *names("m", 2), "z"]) == 2


def test_an_aborted_block_leaves_no_time_behind_for_the_next_in_its_row():
    store = SmallStore()
    grant = store.store.reserve(ANNA, "r", store.namespace, b"", store.keys(["a"]), 30.0, 0.0, keep_s=5.0)
    store.store.abort(ANNA, grant.lease_id, 0.0)
    store.put(ANNA, ["b"])
    store.store.expire(5.0)
    assert store.match(["b"]) == 1
    assert store.tier().ready_bytes == PAGE


def test_pinning_a_prefix_or_cooling_it_again_and_again_costs_no_memory():
    store = SmallSpill(drives=(4,))
    store.put(ANNA, names("a", 4))
    for i in range(3000):
        store.store.pin(store.namespace, store.keys(names("a", 4)), 86400.0, float(i))
        store.store.cool(store.namespace, store.keys(names("a", 4)), float(i))
    pin(store, names("a", 4), 10.0, now_s=3000.0)

    assert len(store.store._pins._kept) < 2000
    assert len(store.store._blocks.policy.policy._cooled) == 4  # type: ignore[attr-defined]
    assert len(store.store._spill.nvme.policy._cooled) == 4  # type: ignore[attr-defined]
    store.store.expire(3010.0)
    assert store.store.next_expiry_s() is None or store.store.next_expiry_s() > 3010.0
    fill(store, "b", now_s=3010.0)
    assert store.match(names("a", 4)) == 0
