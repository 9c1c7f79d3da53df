"""What every SlotSpace (kvstore/core/ports.py) promises. A new implementation joins by adding a factory."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.blocks import Extent, SlotArrays
from kvstore.core.errors import SpecMismatch
from kvstore.core.ports import SlotSpace
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

PAGE = 4096
SEGMENT = 16 * PAGE
Factory = Callable[[int], SlotSpace]


def segmented(num_segments: int) -> SlotSpace:
    generations = np.zeros(num_segments * SEGMENT // PAGE, np.uint64)
    slots = SegmentedSlots(
        num_segments * SEGMENT, generations=SharedGenerations(generations, PAGE), segment_bytes=SEGMENT, align=PAGE
    )
    slots.add_segments(num_segments)
    return slots


@pytest.fixture(params=[segmented])
def make_slots(request: pytest.FixtureRequest) -> Factory:
    return request.param


def one(slots: SlotSpace, nbytes: int) -> Extent:
    extent = slots.reserve(nbytes)
    assert extent is not None
    return extent


def arrays(extents: list[Extent]) -> SlotArrays:
    return SlotArrays(
        np.array([extent.offset for extent in extents], np.int64),
        np.array([extent.generation for extent in extents], np.uint64),
    )


def test_slots_are_aligned_disjoint_and_as_many_as_fit(make_slots: Factory):
    slots = make_slots(2)
    extents = []
    while (extent := slots.reserve(3 * PAGE - 5)) is not None:
        extents.append(extent)
        slots.check()

    assert len(extents) == 2 * (16 // 3)
    assert all(extent.offset % PAGE == 0 and extent.nbytes == 3 * PAGE - 5 for extent in extents)
    starts = sorted(extent.offset for extent in extents)
    assert all(left + 3 * PAGE <= right for left, right in pairwise(starts))
    assert all(start % SEGMENT + 3 * PAGE <= SEGMENT for start in starts)


def test_num_free_is_what_reserve_many_gives(make_slots: Factory):
    slots = make_slots(3)
    assert slots.num_free(5 * PAGE) == 9
    assert len(slots.reserve_many(5 * PAGE, 4).offsets) == 4
    assert slots.num_free(5 * PAGE) == 5
    assert slots.num_free(PAGE) == 16
    assert len(slots.reserve_many(5 * PAGE, 99).offsets) == 5
    assert slots.reserve(5 * PAGE) is None
    slots.check()


def test_a_slot_comes_back_under_another_generation(make_slots: Factory):
    slots = make_slots(1)
    seen = set()
    for _ in range(5):
        extent = one(slots, SEGMENT)
        assert extent.generation not in seen
        seen.add(extent.generation)
        slots.free(extent)


def test_freeing_under_a_stale_generation_is_a_bug(make_slots: Factory):
    slots = make_slots(1)
    stale = one(slots, SEGMENT)
    slots.free(stale)
    owner = one(slots, SEGMENT)
    for operation in (slots.free, slots.to_limbo):
        with pytest.raises(AssertionError):
            operation(stale)
    with pytest.raises(AssertionError):
        slots.free_many(arrays([stale]))
    slots.free(owner)
    slots.check()


def test_freeing_twice_is_a_bug(make_slots: Factory):
    slots = make_slots(1)
    extent = one(slots, PAGE)
    one(slots, PAGE)
    slots.free(extent)
    with pytest.raises(AssertionError):
        slots.free(extent)


def test_a_slot_in_limbo_is_given_to_nobody_until_it_is_freed(make_slots: Factory):
    slots = make_slots(1)
    extent = one(slots, SEGMENT)
    slots.to_limbo(extent)

    assert slots.reserve(SEGMENT) is None
    assert (slots.reserved_bytes, slots.limbo_bytes) == (0, SEGMENT)
    slots.check()

    slots.free(extent)
    assert one(slots, SEGMENT).offset == extent.offset
    assert slots.limbo_bytes == 0
    slots.check()


def test_limbo_is_entered_from_reserved_only(make_slots: Factory):
    slots = make_slots(1)
    extent = one(slots, PAGE)
    slots.to_limbo(extent)
    with pytest.raises(AssertionError):
        slots.to_limbo(extent)


def test_an_empty_segment_goes_to_whichever_size_asks_next(make_slots: Factory):
    slots = make_slots(1)
    small = [one(slots, PAGE) for _ in range(16)]
    assert slots.num_free(SEGMENT) == 0

    slots.free_many(arrays(small[1:]))
    assert slots.num_free(SEGMENT) == 0
    slots.free(small[0])

    assert slots.num_free(SEGMENT) == 1
    assert one(slots, SEGMENT).offset == 0
    slots.check()


def test_a_block_larger_than_a_segment_is_refused(make_slots: Factory):
    slots = make_slots(1)
    assert slots.slot_nbytes(SEGMENT) == SEGMENT
    assert slots.slot_nbytes(1) == PAGE
    for call in (slots.slot_nbytes, slots.reserve, slots.num_free):
        with pytest.raises(SpecMismatch) as caught:
            call(SEGMENT + 1)
        assert caught.value.fields == {"field": "block_nbytes", "value": SEGMENT + 1}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_order_of_calls_conserves_the_tier(data: st.DataObject):
    """Lockstep with a set: nothing overlaps, nothing is lost, an emptied tier is whole again."""
    slots = segmented(3)
    held: list[Extent] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["reserve", "limbo", "free"]))
        if action == "reserve":
            nbytes = data.draw(st.sampled_from([PAGE, 3 * PAGE, 7 * PAGE, SEGMENT]))
            count = data.draw(st.integers(1, 6))
            got = slots.reserve_many(nbytes, count)
            held += [Extent(int(o), nbytes, int(g)) for o, g in zip(*got, strict=True)]
            assert len(got.offsets) == count or slots.num_free(nbytes) == 0
        elif held and action == "limbo":
            slots.to_limbo(held[-1])
            slots.free(held.pop())
        elif held:
            slots.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        pages = [
            page for e in held for page in range(e.offset // PAGE, (e.offset + slots.slot_nbytes(e.nbytes)) // PAGE)
        ]
        assert len(set(pages)) == len(pages)
        assert slots.reserved_bytes == sum(slots.slot_nbytes(e.nbytes) for e in held)
        slots.check()
    slots.free_many(arrays(held))
    assert slots.num_free(SEGMENT) == 3
    slots.check()
