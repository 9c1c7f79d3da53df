"""The slab through the store: what a second read may fill, what others read there, and what comes back from whom and when."""

from typing import Any

import numpy as np
import pytest
from small_store import PAGE, SEGMENT, SmallStore

from kvstore.core.blocks import Holder
from kvstore.core.errors import LeaseExpired, ProtocolError
from kvstore.core.plans import ReadGrant, SlabUse
from kvstore.store_stats import TierStats
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

ANNA, BERT, CLEO = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2), Holder(b"cleo" * 4, 3)
READ, FILL, NONE = SlabUse.READ, SlabUse.FILL, SlabUse.NONE
SLOTS = SEGMENT // PAGE  # in a segment


class Slabbed(SmallStore):
    """With a slab of `slab_segments` segments of 16 blocks."""

    def __init__(self, *, slab_segments: int = 1, **limits: Any) -> None:
        self.slab_generations = np.zeros(slab_segments * SLOTS, np.uint64)
        self.slab_slots = SegmentedSlots(
            slab_segments * SEGMENT, generations=SharedGenerations(self.slab_generations, PAGE), segment_bytes=SEGMENT
        )
        self.slab_slots.add_segments(slab_segments)
        super().__init__(slab=self.slab_slots, **limits)

    def read(self, holder: Holder, names: str, *, now_s: float = 0.0, ttl_s: float = 30.0) -> ReadGrant:
        grant = self.store.acquire(holder, self._new_id(), self.namespace, self.keys(names), 0, ttl_s, now_s, slab=True)
        self.store.check()
        return grant

    def release(self, holder: Holder, grant: ReadGrant, filled: list[int] | None = None, *, now_s: float = 0.0) -> None:
        """All that was to be filled was, unless said otherwise."""
        assert grant.slab is not None
        which = [1] * grant.slab.uses.count(FILL) if filled is None else filled
        self.store.release(holder, grant.lease_id, now_s, filled=bytes(which))
        self.store.check()

    def slab(self) -> TierStats:
        self.store.check()
        (tier,) = [tier for tier in self.store.stats().tiers if tier.name == "slab"]
        used = tier.ready_bytes + tier.writing_bytes + tier.leaving_bytes + tier.limbo_bytes
        assert used + tier.free_bytes == tier.capacity_bytes
        return tier

    def heat(self, names: str) -> None:
        """Put, read once, read a second time and filled."""
        self.put(ANNA, names)
        for _ in range(2):
            self.release(ANNA, self.read(ANNA, names))


def uses(grant: ReadGrant) -> list[int]:
    assert grant.slab is not None
    return list(grant.slab.uses)


def test_what_is_read_a_second_time_is_filled_and_then_read_there() -> None:
    small = Slabbed()
    small.put(ANNA, "abcd")
    first = small.read(ANNA, "abcd")
    assert uses(first) == [NONE] * 4
    small.release(ANNA, first)

    second = small.read(BERT, "ab")
    assert uses(second) == [FILL] * 2
    small.release(BERT, second)
    third = small.read(CLEO, "abcd")

    assert uses(third) == [READ, READ, FILL, FILL]
    assert third.slab is not None
    assert second.slab is not None
    assert third.slab.slots.offsets[:2].tolist() == second.slab.slots.offsets.tolist()
    assert len(third.extents) == 4, "the arena's slots are granted all the same"
    small.release(CLEO, third)
    assert small.slab().ready_blocks == 4
    assert small.counter("slab_filled_blocks_total") == 4
    assert small.counter("slab_read_blocks_total") == 2


def test_who_does_not_ask_for_the_slab_gets_none_of_it() -> None:
    small = Slabbed()
    small.heat("abcd")
    grant = small.acquire(BERT, "abcd")

    assert grant.slab is None
    assert SmallStore().acquire(ANNA, "").slab is None


def test_what_was_not_filled_is_free_again_and_may_be_filled_next_time() -> None:
    small = Slabbed()
    small.put(ANNA, "abcd")
    small.release(ANNA, small.read(ANNA, "abcd"))
    small.release(BERT, small.read(BERT, "abcd"), [1, 0, 0, 1])

    grant = small.read(CLEO, "abcd")

    assert uses(grant) == [READ, FILL, FILL, READ]
    small.store.abort(CLEO, grant.lease_id, 0.0)
    assert small.slab().ready_blocks == 2
    assert small.slab().free_bytes == (SLOTS - 2) * PAGE


def test_two_that_read_at_once_do_not_fill_the_same_slot() -> None:
    small = Slabbed()
    small.put(ANNA, "ab")
    small.release(ANNA, small.read(ANNA, "ab"))
    one, other = small.read(ANNA, "ab"), small.read(BERT, "ab")

    assert (uses(one), uses(other)) == ([FILL, FILL], [NONE, NONE])
    small.release(BERT, other)
    small.release(ANNA, one)
    assert uses(small.read(BERT, "ab")) == [READ, READ]


def test_the_same_request_again_gets_the_same_slots() -> None:
    small = Slabbed()
    small.heat("ab")
    small.put(ANNA, "x")
    small.release(ANNA, small.read(ANNA, "x"))
    once = small.store.acquire(BERT, "r", small.namespace, small.keys("ab"), 0, 30.0, 0.0, slab=True)
    again = small.store.acquire(BERT, "r", small.namespace, small.keys("ab"), 0, 30.0, 0.0, slab=True)

    assert once.slab is not None
    assert again.slab is not None
    assert once.slab.uses == again.slab.uses
    assert once.slab.slots.offsets.tolist() == again.slab.slots.offsets.tolist()


def test_a_wrong_number_of_answers_is_refused_and_the_lease_goes_on() -> None:
    small = Slabbed()
    small.put(ANNA, "ab")
    small.release(ANNA, small.read(ANNA, "ab"))
    grant = small.read(ANNA, "ab")

    with pytest.raises(ProtocolError) as caught:
        small.release(ANNA, grant, [1])

    assert caught.value.fields["field"] == "filled"
    small.release(ANNA, grant, [1, 1])
    assert small.slab().ready_blocks == 2


def test_slots_of_a_lease_that_expired_come_back_when_its_holder_says_so_and_nobody_gets_them_before() -> None:
    small = Slabbed()
    small.put(ANNA, "abcd")
    small.release(ANNA, small.read(ANNA, "abcd"))
    late = small.read(ANNA, "abcd", ttl_s=5.0)
    assert late.slab is not None
    assert small.store.expire(6.0) == 1
    assert small.slab().limbo_bytes == 4 * PAGE

    other = small.read(BERT, "abcd", now_s=6.0)
    assert other.slab is not None
    assert uses(other) == [FILL] * 4
    assert not set(other.slab.slots.offsets.tolist()) & set(late.slab.slots.offsets.tolist())
    with pytest.raises(LeaseExpired):
        small.release(ANNA, late, now_s=7.0)
    assert small.slab().limbo_bytes == 0
    small.release(BERT, other, now_s=7.0)
    assert small.slab().ready_blocks == 4


def test_nothing_is_filled_while_more_than_a_quarter_is_in_limbo() -> None:
    small = Slabbed(limbo_fraction=1.0)
    small.heat("ab")
    for names in ("cdef", "ghij"):
        small.put(ANNA, names)
        small.release(ANNA, small.read(ANNA, names))
        small.read(BERT, names, ttl_s=5.0)
    small.store.expire(6.0)
    assert small.slab().limbo_bytes == 8 * PAGE

    assert uses(small.read(CLEO, "cdef", now_s=6.0)) == [NONE] * 4
    assert uses(small.read(CLEO, "ab", now_s=6.0)) == [READ] * 2
    small.store.end_instance(BERT.instance, 7.0)
    assert uses(small.read(CLEO, "cdef", now_s=7.0)) == [FILL] * 4


def test_slots_of_a_dead_engine_come_back_when_it_is_dead() -> None:
    small = Slabbed()
    small.heat("abcd")
    small.put(ANNA, "xy")
    small.release(ANNA, small.read(ANNA, "xy"))
    small.read(BERT, "xy")
    small.read(BERT, "abcd")

    small.store.end_session(BERT, 1.0)
    assert small.slab().limbo_bytes == 2 * PAGE
    small.store.end_instance(BERT.instance, 2.0)

    assert small.slab().limbo_bytes == 0
    assert small.slab().ready_blocks == 4


def test_a_full_slab_gives_up_the_least_recent_leaf_but_nothing_that_is_read() -> None:
    small = Slabbed(num_segments=8)
    for names in ("abcd", "efgh", "ijkl", "mnop"):
        small.heat(names)
    assert small.slab().free_bytes == 0
    reading = small.read(BERT, "abcd")
    generations = small.slab_generations.copy()

    small.heat("wxyz")

    assert reading.slab is not None
    pages = reading.slab.slots.offsets // PAGE
    assert (small.slab_generations[pages] == generations[pages]).all(), "I4, I7"
    assert uses(small.read(CLEO, "efgh")) == [FILL] * 4
    small.release(BERT, reading)
    evicted = small.counter("slab_evicted_blocks_total")
    assert evicted >= 4
    removals = {(each.tier, each.reason): each for each in small.store.removals()}
    assert removals["slab", "evicted"].num_blocks == evicted
    assert removals["slab", "evicted"].policy == "leaf_lru"
    assert small.store.held_by_tenant()[""]["slab"] == small.slab().ready_bytes > 0


def test_one_long_prompt_does_not_take_the_slab() -> None:
    small = Slabbed(num_segments=8, slab_segments=2)
    small.heat("abcd")
    small.heat("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

    assert small.slab().ready_blocks == 4 + 8, "a quarter of 32"


def test_what_ram_gives_up_the_slab_gives_up_too() -> None:
    small = Slabbed(num_segments=1)
    small.heat("abcd")
    assert small.slab().ready_blocks == 4

    small.put(BERT, "efghijklmnopqrst")  # all that the arena holds

    assert small.slab().ready_blocks == 0
    assert small.slab().free_bytes == small.slab().capacity_bytes


def test_a_dropped_block_is_not_read_there_any_more_and_its_slot_waits_for_its_reader() -> None:
    small = Slabbed()
    small.heat("abcd")
    reading = small.read(BERT, "abcd")
    assert small.store.drop(small.namespace, small.keys("c")) == 2
    small.store.check()
    assert small.slab().leaving_blocks == 2

    small.put(CLEO, "x")
    small.release(BERT, reading)

    assert small.slab().ready_blocks == 2
    assert small.slab().leaving_blocks == 0


def test_what_is_dropped_while_it_is_filled_is_not_published() -> None:
    small = Slabbed()
    small.put(ANNA, "abcd")
    small.release(ANNA, small.read(ANNA, "abcd"))
    filling = small.read(BERT, "abcd")
    small.store.drop(small.namespace, None)
    small.store.check()

    small.release(BERT, filling)

    assert small.slab().free_bytes == small.slab().capacity_bytes
    assert small.slab().ready_blocks == 0


def test_a_block_that_was_pinned_or_cooled_goes_from_here_too() -> None:
    small = Slabbed(num_segments=8)
    small.put(ANNA, "abcd")
    small.store.pin(small.namespace, small.keys("abcd"), 10.0, 0.0)
    small.heat("abcd")
    for names in ("efgh", "ijkl", "mnop"):
        small.heat(names)
    small.store.cool(small.namespace, small.keys("ijkl"), 1.0)
    small.heat("qrst")
    assert uses(small.read(CLEO, "ijkl")) == [FILL] * 4, "cooled: before all others"

    small = Slabbed(num_segments=8)
    small.put(ANNA, "abcd")
    small.store.pin(small.namespace, small.keys("abcd"), 10.0, 0.0)
    small.heat("abcd")
    small.store.expire(11.0)
    small.store.check()


def test_pins_keep_blocks_in_ram_and_not_in_the_slab() -> None:
    small = Slabbed(num_segments=8)
    prompts = ("abcd", "efgh", "ijkl", "mnop")
    for names in prompts:
        small.put(ANNA, names)
        assert small.store.pin(small.namespace, small.keys(names), 1000.0, 0.0) == 4
        small.heat(names)
    assert small.slab().free_bytes == 0

    small.heat("wxyz")

    assert uses(small.read(CLEO, "wxyz")) == [READ] * 4
    assert uses(small.read(CLEO, "abcd")) != [READ] * 4
