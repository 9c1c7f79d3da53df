"""SegmentedSlots beyond the contract: generations as clients see them, segments that arrive later, which slot is next."""

import numpy as np
import pytest

from kvstore.core.blocks import Extent, SlotArrays
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots, SharedGenerations

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


# --- generations ------------------------------------------------------------------------------------------------------


def shown(generations: np.ndarray, reserved: SlotArrays) -> list[bool]:
    """Whether a reader that was given these slots finds their generation in the table."""
    return (generations[reserved.offsets // PAGE] == reserved.generations).tolist()


def test_a_slot_reserved_without_announcement_is_hidden_until_it_is_announced():
    slots, generations = make_slots(1, ready=1)
    reserved = slots.reserve_many(PAGE, 3, announced=False)
    assert shown(generations, reserved) == [False] * 3

    slots.announce(SlotArrays(reserved.offsets[1:2], reserved.generations[1:2]))

    assert shown(generations, reserved) == [False, True, False]


def test_a_slot_reserved_for_a_writer_is_shown_at_once():
    slots, generations = make_slots(1, ready=1)
    assert shown(generations, slots.reserve_many(PAGE, 2)) == [True, True]


def test_a_slot_freed_without_announcement_never_shows_its_generation():
    slots, generations = make_slots(1, ready=1)
    hidden = slots.reserve_many(SEGMENT, 1, announced=False)
    slots.free_many(hidden)
    for announced in (False, True, False, True):
        assert shown(generations, hidden) == [False]
        other = slots.reserve_many(SEGMENT, 1, announced=announced)
        assert shown(generations, hidden) == [False]
        slots.free_many(other)


def test_the_table_only_goes_up_and_is_even_while_a_slot_is_free():
    slots, generations = make_slots(1, ready=1)
    last = 0
    for announced in (True, False, False, True, True):
        reserved = slots.reserve_many(SEGMENT, 1, announced=announced)
        assert int(generations[0]) == (last + 1 if announced else last)
        slots.free_many(reserved)
        assert int(generations[0]) == last + 2
        last += 2


def test_announcing_twice_or_what_was_freed_is_a_bug():
    slots, _ = make_slots(1, ready=1)
    reserved = slots.reserve_many(PAGE, 2, announced=False)
    slots.announce(reserved)
    with pytest.raises(AssertionError):
        slots.announce(reserved)
    again = slots.reserve_many(PAGE, 1, announced=False)
    slots.free_many(again)
    with pytest.raises(AssertionError):
        slots.announce(again)


def test_a_hidden_slot_goes_to_limbo_and_comes_back():
    slots, generations = make_slots(1, ready=1)
    hidden = slots.reserve_many(SEGMENT, 1, announced=False)
    extent = hidden.extents(SEGMENT)[0]
    slots.to_limbo(extent)
    assert shown(generations, hidden) == [False]
    slots.free(extent)
    assert shown(generations, hidden) == [False]
    slots.check()


def test_freeing_under_a_stale_generation_is_a_bug():
    """The shared table knows; the counter of drives does not, they have no table."""
    slots, _ = make_slots(1, ready=1)
    stale = reserve(slots, SEGMENT)
    slots.free(stale)
    owner = reserve(slots, SEGMENT)
    for operation in (slots.free, slots.to_limbo):
        with pytest.raises(AssertionError):
            operation(stale)
    slots.free(owner)
    slots.check()


def test_a_counter_is_shared_by_drives_and_gives_no_number_twice():
    counted = CountedGenerations(first=100)
    one, other = (SegmentedSlots(SEGMENT, generations=counted, segment_bytes=SEGMENT) for _ in range(2))
    for drive in (one, other):
        drive.add_segments(1)
    first = one.reserve_many(PAGE, 2)
    second = other.reserve_many(PAGE, 2, announced=False)
    one.free_many(first)
    assert first.generations.tolist() == [100, 101]
    assert second.generations.tolist() == [102, 103]
    assert one.reserve_many(PAGE, 1).generations.tolist() == [104]


def test_a_counter_goes_on_behind_what_it_is_told_of_and_never_back():
    counted = CountedGenerations()
    slots = SegmentedSlots(SEGMENT, generations=counted, segment_bytes=SEGMENT)
    for pages, numbers in (([0, 1], [7, 30]), ([2], [5]), ([], [])):
        slots.restore(PAGE, SlotArrays(np.array(pages, np.int64) * PAGE, np.array(numbers, np.uint64)))
    slots.add_segments(1)
    assert slots.reserve_many(PAGE, 2).generations.tolist() == [31, 32]


def test_a_generation_that_was_never_given_out_frees_nothing():
    slots = SegmentedSlots(SEGMENT, generations=CountedGenerations(), segment_bytes=SEGMENT)
    slots.add_segments(1)
    extent = reserve(slots, PAGE)
    with pytest.raises(AssertionError):
        slots.free(extent._replace(generation=extent.generation + 1))


@pytest.mark.parametrize(
    ("nbytes", "pages"),
    [(2 * PAGE, [1]), (5 * PAGE, [15]), (PAGE, [3, 3])],
    ids=["not where a slot starts", "across the end of a segment", "the same slot twice"],
)
def test_slots_that_cannot_have_been_are_not_restored(nbytes: int, pages: list[int]):
    slots, _ = make_slots(2, ready=0)
    offsets = np.array(pages, np.int64) * PAGE
    with pytest.raises(AssertionError):  # noqa: PT012 - the last of them is noticed when the segments are added
        slots.restore(nbytes, SlotArrays(offsets, np.ones(len(offsets), np.uint64)))
        slots.add_segments(2)


def test_a_segment_does_not_have_slots_of_two_sizes():
    slots, _ = make_slots(1, ready=0)
    one = np.ones(1, np.uint64)
    slots.restore(PAGE, SlotArrays(np.array([0], np.int64), one))
    slots.restore(2 * PAGE, SlotArrays(np.array([2 * PAGE], np.int64), one))
    with pytest.raises(AssertionError):
        slots.add_segments(1)


def test_nothing_is_restored_once_there_are_segments():
    slots, _ = make_slots(1, ready=1)
    with pytest.raises(AssertionError):
        slots.restore(PAGE, SlotArrays(np.array([0], np.int64), np.ones(1, np.uint64)))
