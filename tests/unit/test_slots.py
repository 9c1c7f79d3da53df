"""SegmentedSlots beyond the contract: generations as clients see them, segments that arrive later, which slot is next."""

import numpy as np
import pytest

from kvstore.core.blocks import Extent, SlotArrays
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

PAGE = 4096
SEGMENT = 16 * PAGE


def make_slots(num_segments: int, ready: int) -> tuple[SegmentedSlots, np.ndarray]:
    generations = np.zeros(num_segments * SEGMENT // PAGE, np.uint64)
    slots = SegmentedSlots(
        num_segments * SEGMENT, generations=SharedGenerations(generations, PAGE), segment_bytes=SEGMENT, align=PAGE
    )
    slots.add_segments(ready)
    return slots, generations


def reserve(slots: SegmentedSlots, nbytes: int) -> Extent:
    extent = slots.reserve(nbytes)
    assert extent is not None
    return extent


def test_only_segments_that_were_added_are_given_out():
    slots, _ = make_slots(3, ready=0)
    assert slots.capacity_bytes == 0
    assert slots.reserve(PAGE) is None

    slots.add_segments(2)

    assert slots.capacity_bytes == 2 * SEGMENT
    assert slots.num_free(SEGMENT) == 2
    slots.check()


@pytest.mark.parametrize("verb", ["free", "free_many"])
def test_a_reader_of_a_freed_slot_sees_another_generation_even_before_it_is_reused(verb: str):
    slots, generations = make_slots(1, ready=1)
    extent = reserve(slots, 2 * PAGE)
    assert generations[extent.offset // PAGE] == extent.generation

    if verb == "free":
        slots.free(extent)
    else:
        slots.free_many(SlotArrays(np.array([extent.offset]), np.array([extent.generation], np.uint64)))

    assert generations[extent.offset // PAGE] != extent.generation


def test_a_stale_reader_is_noticed_after_the_segment_went_to_a_class_with_other_slot_starts():
    slots, generations = make_slots(1, ready=1)
    small = [reserve(slots, PAGE) for _ in range(16)]
    for extent in small:
        slots.free(extent)
    reserve(slots, 5 * PAGE)
    assert all(generations[extent.offset // PAGE] != extent.generation for extent in small)


def test_low_segments_fill_first_so_that_high_ones_run_empty():
    slots, _ = make_slots(3, ready=3)
    extents = [reserve(slots, PAGE) for _ in range(48)]
    assert [extent.offset for extent in extents] == [PAGE * i for i in range(48)]

    slots.free(extents[40])
    slots.free(extents[3])
    slots.free(extents[7])

    assert [reserve(slots, PAGE).offset // PAGE for _ in range(3)] == [7, 3, 40]
    slots.check()


def test_reserve_many_crosses_segments_in_address_order():
    slots, _ = make_slots(3, ready=3)
    reserved = slots.reserve_many(5 * PAGE, 7)
    assert (reserved.offsets // PAGE).tolist() == [0, 5, 10, 16, 21, 26, 32]
    slots.check()


def test_slots_from_before_a_restart_count_as_soon_as_their_segments_do():
    """What is asked in between finds no capacity, and no more in use than that."""
    slots, _ = make_slots(2, ready=0)
    offsets = np.array([0, 3 * PAGE, SEGMENT], np.int64)

    slots.restore(PAGE, SlotArrays(offsets, np.array([1, 3, 5], np.uint64)))
    before = slots.capacity_bytes, slots.reserved_bytes
    slots.check()
    slots.add_segments(2)

    assert before == (0, 0)
    assert (slots.capacity_bytes, slots.reserved_bytes) == (2 * SEGMENT, 3 * PAGE)
    assert slots.num_free(PAGE) == 2 * 16 - 3
    slots.check()
