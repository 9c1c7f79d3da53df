"""What every SlotSpace (kvstore/core/ports.py) promises. A new implementation joins by adding two factories."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.blocks import Extent, SlotArrays
from kvstore.core.errors import SpecMismatch
from kvstore.core.moves import DRIVE_SHIFT
from kvstore.core.ports import SlotSpace
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots, SharedGenerations
from kvstore.tiers.striped import StripedSlots

PAGE = 4096
SEGMENT = 16 * PAGE
EmptyFactory = Callable[[int], tuple[SlotSpace, Callable[[], None]]]
Factory = Callable[[int], SlotSpace]


def empty_segmented(num_segments: int) -> tuple[SlotSpace, Callable[[], None]]:
    """Without segments; the call adds them."""
    generations = np.zeros(num_segments * SEGMENT // PAGE, np.uint64)
    slots = SegmentedSlots(
        num_segments * SEGMENT, generations=SharedGenerations(generations, PAGE), segment_bytes=SEGMENT, align=PAGE
    )
    return slots, lambda: slots.add_segments(num_segments)


def empty_counted(num_segments: int) -> tuple[SlotSpace, Callable[[], None]]:
    """One drive."""
    slots = SegmentedSlots(num_segments * SEGMENT, generations=CountedGenerations(), segment_bytes=SEGMENT, align=PAGE)
    return slots, lambda: slots.add_segments(num_segments)


def empty_striped(num_segments: int) -> tuple[SlotSpace, Callable[[], None]]:
    """Two drives, the first larger by one segment when they cannot be alike."""
    counts = [-(-num_segments // 2), num_segments // 2]
    generations = CountedGenerations()
    drives = [
        SegmentedSlots(count * SEGMENT, generations=generations, segment_bytes=SEGMENT, align=PAGE) for count in counts
    ]

    def add() -> None:
        for drive, count in zip(drives, counts, strict=True):
            drive.add_segments(count)

    return StripedSlots(drives), add


EMPTY = [empty_segmented, empty_counted, empty_striped]


@pytest.fixture(params=EMPTY)
def make_empty(request: pytest.FixtureRequest) -> EmptyFactory:
    return request.param


@pytest.fixture
def make_slots(make_empty: EmptyFactory) -> Factory:
    return lambda num_segments: filled(make_empty, num_segments)


def filled(make_empty: EmptyFactory, num_segments: int) -> SlotSpace:
    slots, add_segments = make_empty(num_segments)
    add_segments()
    return slots


def one(slots: SlotSpace, nbytes: int) -> Extent:
    extent = slots.reserve(nbytes)
    assert extent is not None
    return extent


def arrays(extents: list[Extent]) -> SlotArrays:
    return SlotArrays(
        np.array([extent.offset for extent in extents], np.int64),
        np.array([extent.generation for extent in extents], np.uint64),
    )


def test_free_slots_are_all_that_is_free_but_what_is_too_short_for_one(make_slots: Factory):
    slots = make_slots(4)
    assert slots.free_slots_bytes == slots.capacity_bytes == 4 * SEGMENT
    extent = one(slots, 7 * PAGE)
    assert slots.free_slots_bytes == 3 * SEGMENT + 7 * PAGE
    slots.to_limbo(extent)
    assert slots.free_slots_bytes == 3 * SEGMENT + 7 * PAGE
    slots.free(extent)
    assert slots.free_slots_bytes == 4 * SEGMENT


def test_slots_are_aligned_disjoint_and_as_many_as_fit(make_slots: Factory):
    slots = make_slots(2)
    extents = []
    while (extent := slots.reserve(3 * PAGE - 5)) is not None:
        extents.append(extent)
        slots.check()

    assert len(extents) == 2 * (16 // 3)
    assert all(extent.offset % PAGE == 0 and extent.nbytes == 3 * PAGE - 5 for extent in extents)
    starts = sorted(extent.offset for extent in extents)
    assert len(set(starts)) == len(starts)
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


def test_freeing_under_a_generation_that_was_never_given_out_is_a_bug(make_slots: Factory):
    slots = make_slots(1)
    extent = one(slots, SEGMENT)
    wrong = extent._replace(generation=extent.generation + 1000)
    for operation in (slots.free, slots.to_limbo):
        with pytest.raises(AssertionError):
            operation(wrong)
    with pytest.raises(AssertionError):
        slots.free_many(arrays([wrong]))
    slots.free(extent)
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


def test_slots_reserved_without_announcement_are_reserved_all_the_same(make_slots: Factory):
    slots = make_slots(2)
    reserved = slots.reserve_many(PAGE, 3, announced=False)
    assert len(reserved.offsets) == 3
    assert slots.reserved_bytes == 3 * PAGE
    slots.announce(reserved)
    assert slots.num_free(PAGE) == 29
    slots.free_many(reserved)
    assert slots.num_free(SEGMENT) == 2
    slots.check()


@pytest.mark.parametrize("ends", ["announced", "not announced"])
def test_a_slot_that_was_hidden_comes_back_under_another_generation(make_slots: Factory, ends: str):
    slots = make_slots(1)
    hidden = slots.reserve_many(SEGMENT, 1, announced=False)
    if ends == "announced":
        slots.announce(hidden)
    slots.free_many(hidden)
    assert one(slots, SEGMENT).generation != hidden.generations[0]


def restored_slots(make_empty: EmptyFactory) -> tuple[SlotSpace, SlotSpace, SlotArrays, SlotArrays]:
    """A tier, its successor after a restart, and what both have in use: small and large slots, with gaps."""
    before, after = filled(make_empty, 4), make_empty(4)
    small, large = before.reserve_many(PAGE, 9), before.reserve_many(7 * PAGE, 3)
    before.free_many(SlotArrays(*(column[::2] for column in small)))
    kept = SlotArrays(*(column[1::2] for column in small))
    slots, add_segments = after
    for part in (slice(0, 2), slice(2, None)):
        slots.restore(PAGE, SlotArrays(*(column[part] for column in kept)))
    slots.restore(7 * PAGE - 3, large)
    add_segments()
    return before, slots, kept, large


def test_slots_of_before_a_restart_are_in_use_and_the_rest_is_free(make_empty: EmptyFactory):
    before, after, small, large = restored_slots(make_empty)
    after.check()
    assert after.reserved_bytes == before.reserved_bytes == 4 * PAGE + 3 * 7 * PAGE
    assert after.capacity_bytes == before.capacity_bytes
    for nbytes in (PAGE, 7 * PAGE, SEGMENT):
        assert after.num_free(nbytes) == before.num_free(nbytes)

    taken = {*small.offsets.tolist(), *large.offsets.tolist()}
    more = after.reserve_many(PAGE, 99).offsets.tolist()

    assert not taken & set(more)
    after.check()


def test_restored_slots_come_back_like_any_other(make_empty: EmptyFactory):
    _, after, small, large = restored_slots(make_empty)
    for extent in small.extents(PAGE):
        after.to_limbo(extent)
    assert after.limbo_bytes == 4 * PAGE
    after.free_many(large)
    after.free_many(small)
    assert after.num_free(SEGMENT) == 4
    assert after.reserved_bytes == after.limbo_bytes == 0
    after.check()


def test_generations_given_out_after_a_restart_are_new(make_empty: EmptyFactory):
    _, after, small, large = restored_slots(make_empty)
    old = {*zip(*(column.tolist() for column in small), strict=True)} | {
        *zip(*(column.tolist() for column in large), strict=True)
    }
    after.free_many(small)
    after.free_many(large)
    new = after.reserve_many(PAGE, 64)
    assert not old & {*zip(*(column.tolist() for column in new), strict=True)}


def test_no_slots_are_a_run_too(make_slots: Factory):
    slots = make_slots(1)
    assert len(slots.reserve_many(PAGE, 0).offsets) == 0
    slots.free_many(arrays([]))
    slots.announce(arrays([]))
    slots.check()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), make_empty=st.sampled_from(EMPTY))
def test_any_order_of_calls_conserves_the_tier(data: st.DataObject, make_empty: EmptyFactory):
    """Lockstep with a set: nothing overlaps, nothing is lost, an emptied tier is whole again."""
    slots = filled(make_empty, 3)
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


# --- several drives ---------------------------------------------------------------------------------------------------


def two_drives(*num_segments: int) -> StripedSlots:
    generations = CountedGenerations()
    drives = []
    for count in num_segments:
        drives.append(SegmentedSlots(count * SEGMENT, generations=generations, segment_bytes=SEGMENT, align=PAGE))
        drives[-1].add_segments(count)
    return StripedSlots(drives)


def owners(slots: SlotArrays) -> list[int]:
    return (slots.offsets >> DRIVE_SHIFT).tolist()


def test_slots_are_dealt_out_in_turn_over_calls_and_a_full_drive_is_passed_over():
    slots = two_drives(1, 2)
    assert owners(slots.reserve_many(4 * PAGE, 3)) == [0, 1, 0]
    assert owners(slots.reserve_many(4 * PAGE, 3)) == [1, 0, 1]
    assert owners(slots.reserve_many(4 * PAGE, 4)) == [0, 1, 1, 1]
    assert owners(slots.reserve_many(4 * PAGE, 9)) == [1, 1]


def test_a_run_s_slots_and_generations_belong_together_whichever_drive_they_are_on():
    slots = two_drives(1, 1)
    reserved = slots.reserve_many(PAGE, 6)
    assert [offset & (1 << DRIVE_SHIFT) - 1 for offset in reserved.offsets.tolist()] == [
        0,
        0,
        PAGE,
        PAGE,
        2 * PAGE,
        2 * PAGE,
    ]
    assert len(set(reserved.generations.tolist())) == 6
    slots.free_many(SlotArrays(reserved.offsets[::-1], reserved.generations[::-1]))
    assert slots.num_free(SEGMENT) == 2


def test_a_closed_drive_gives_out_nothing_and_takes_everything_back():
    slots = two_drives(1, 1)
    held = slots.reserve_many(PAGE, 4)
    slots.set_open(0, is_open=False)
    slots.set_open(0, is_open=False)

    assert slots.open_drives == (1,)
    assert slots.num_free(PAGE) == 14
    assert owners(slots.reserve_many(PAGE, 3)) == [1, 1, 1]
    slots.free_many(held)
    slots.check()
    slots.set_open(0, is_open=True)
    assert slots.open_drives == (0, 1)
    assert slots.num_free(SEGMENT) == 1
    assert owners(slots.reserve_many(PAGE, 2)) in ([0, 1], [1, 0])


def test_without_drives_there_is_no_slot():
    slots = StripedSlots([])
    assert slots.slot_nbytes(PAGE + 1) == 2 * PAGE
    assert (slots.capacity_bytes, slots.open_drives, slots.num_free(PAGE)) == (0, (), 0)
    assert slots.reserve(PAGE) is None
    assert len(slots.reserve_many(PAGE, 3).offsets) == 0
    slots.check()


def test_a_drive_that_is_off_is_passed_over():
    slots = two_drives(0, 1)
    assert owners(slots.reserve_many(PAGE, 3)) == [1, 1, 1]


def test_many_slots_of_different_sizes_go_to_limbo_and_come_back_together(make_slots: Factory):
    slots = make_slots(4)
    extents = [one(slots, PAGE), one(slots, 3 * PAGE), one(slots, PAGE)]
    slots.to_limbo_many(arrays(extents))
    slots.check()
    assert (slots.reserved_bytes, slots.limbo_bytes) == (0, 5 * PAGE)
    with pytest.raises(AssertionError):
        slots.to_limbo_many(arrays(extents[:1]))
    slots.free_many(arrays(extents))
    slots.check()
    assert slots.limbo_bytes == 0
