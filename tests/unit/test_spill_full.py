"""Drives that are full, or that refuse a write: what goes, which slots are used again and when. A block is a page."""

from itertools import pairwise

import pytest
from small_spill import SmallSpill, drive_of
from small_store import PAGE, spec

from kvstore.core.blocks import Holder
from kvstore.core.limits import DRIVE_RETRY_S
from kvstore.core.moves import BAD_SLOT, DRIVE_SHIFT, FAILURES, Move, MoveProblem

ANNA, BERT = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2)
HARMLESS = sorted(FAILURES - BAD_SLOT - {MoveProblem.STOPPED})


# --- full drives ------------------------------------------------------------------------------------------------------


def full_drive(**options: object) -> SmallSpill:
    """One drive of 16 blocks: the sequence 0, and fourteen blocks that were used after it; all of them in RAM too."""
    small = SmallSpill(drives=(1,), **options)
    for names in (["0", "1"], *([f"k{i}"] for i in range(14))):
        small.put(ANNA, names)
    assert len(small.settle()) == 16
    return small


def test_a_full_drive_gives_up_the_tail_of_its_coldest_sequence_and_waits_until_that_is_durable():
    small = full_drive()
    small.put(ANNA, "x")
    assert small.orders() == []
    assert small.names(small.forgets) == ["1"]
    assert small.forgets[0].problem is None
    assert (small.nvme().limbo_bytes, small.nvme().free_bytes) == (PAGE, 0)
    assert small.orders() == [], "one removal is waited for, no second one ordered"

    freed = small.forgets[0].offset
    small.commit_index()
    moves = small.orders()

    assert small.names(moves) == ["x"]
    assert moves[0].record.offset == freed
    assert small.forgets == []
    assert small.counter("nvme_evicted_blocks_total") == 1
    small.store.finish_forgets([])
    small.put(ANNA, "y")
    small.finish(moves)
    assert small.names(small.orders() or small.forgets) == ["0"]


def test_a_full_drive_gives_up_a_slice_in_a_turn_until_a_good_part_is_being_removed(monkeypatch: pytest.MonkeyPatch):
    """Thousands at once would keep every engine waiting."""
    monkeypatch.setattr("kvstore.spill.EVICTION_SLICE_BLOCKS", 3)
    small = SmallSpill(drives=(32,), restored=[f"r{i}" for i in range(512)])
    small.put(ANNA, "x")

    seen = []
    for _ in range(5):
        assert small.orders() == []
        seen.append(len(small.forgets))

    assert seen == [3, 6, 8, 8, 8], "a 64th of the drive"
    assert small.names(small.forgets) == [f"r{i}" for i in range(511, 503, -1)]
    small.commit_index()
    assert small.names(small.orders()) == ["x"]
    assert len(small.forgets) == 0


def test_colder_blocks_of_another_size_leave_a_full_drive_as_many_at_a_time_as_of_the_same():
    small = SmallSpill(num_segments=8, drives=(4,))
    for i in range(64):
        small.put(ANNA, [f"k{i}"])
    assert len(small.settle()) == 64

    small.put(ANNA, "x", namespace=small.open(spec(pages=4, weights="large")))

    num_commits = 0
    while not (moves := small.orders()):
        assert small.names(small.forgets) == [f"k{i}" for i in range(4 * num_commits, 4 * num_commits + 4)]
        small.commit_index()
        num_commits += 1
    assert small.names(moves) == ["x"]
    assert num_commits == 4, "a segment is empty"


def test_of_a_chain_is_written_what_there_are_slots_for_and_the_rest_when_there_are_more():
    small = SmallSpill(drives=(1,), write_policy="write_through_selective")
    small.put(ANNA, "abcd")
    for i in range(14):
        small.put(ANNA, [f"k{i}"])
        small.acquire(BERT, [f"k{i}"])
    small.settle()
    small.acquire(BERT, "abcd", first_needed=3)

    first = small.orders()
    assert small.names(first) == ["a", "b"]
    assert small.names(small.forgets) == ["k0"]
    small.finish(first)
    assert small.names(small.settle()) == ["c", "d"]
    assert small.counter("nvme_evicted_blocks_total") == 2


def test_removals_are_ordered_a_good_part_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill._EVICTED_AT_ONCE_FRACTION", 1 / 4)
    small = full_drive()
    small.put(ANNA, "x")
    small.orders()
    assert small.names(small.forgets) == ["1", "0", "k0", "k1"]


def test_a_removal_reported_twice_or_for_another_generation_frees_nothing():
    small = full_drive()
    small.put(ANNA, "x")
    small.orders()
    forget = small.forgets[0]
    small.store.finish_forgets([forget._replace(generation=forget.generation + 1)])
    small.store.check()
    assert small.orders() == []
    small.commit_index()
    small.finish(small.orders())
    small.store.finish_forgets([forget])
    assert small.nvme().ready_blocks == 16


def test_the_parent_of_what_is_about_to_be_written_is_not_given_up():
    small = full_drive()
    small.put(ANNA, ["child"], parent="1")
    for i in range(14):
        small.match([f"k{i}"])  # so that 1 is the coldest
    small.orders()
    assert small.names(small.forgets) == ["k0"]


def test_the_last_copy_of_a_block_with_children_in_ram_only_is_not_given_up():
    """The head of the coldest sequence is on the drive only, and its tail in RAM only."""
    small = SmallSpill(drives=(1,), start=False, write_policy="write_through_selective")
    small.restore("p", last_use=[1])
    for i in range(15):
        small.restore([f"k{i}"], last_use=[10 + i])
    small.start()
    small.put(ANNA, "c", parent="p")
    small.put(ANNA, "x")
    for i in range(15):
        small.match([f"k{i}"])
    small.acquire(BERT, "x")

    small.orders()

    assert small.names(small.forgets) == ["k0"]
    small.store.drop(small.namespace, small.keys("c"))
    small.put(ANNA, "y")
    small.settle()
    small.acquire(BERT, "y")
    small.orders()
    assert small.names(small.forgets) == ["p"], "nothing needs it any more"


def test_a_block_that_is_in_ram_too_may_go_from_the_drive_whatever_its_children_are():
    small = full_drive(write_policy="write_through")
    small.store.drop(small.namespace, small.keys("x"))
    small.put(ANNA, ["late"], parent="1")
    small.orders()
    small.commit_index()
    assert small.tiers_of(["0", "1", "late"]) == [0, 0, 0]


def test_blocks_being_read_are_not_given_up_and_what_finds_no_room_is_counted():
    small = SmallSpill(drives=(1,), start=False)
    for i in range(16):
        small.restore([f"k{i}"])
    small.start()
    for i in range(16):
        small.store.prefetch(small.namespace, small.keys([f"k{i}"]), 0, 0.0)
    reads = small.orders()
    small.put(ANNA, "x")

    assert small.orders() == []
    assert small.forgets == []
    assert small.counter("skipped_writes_no_space_total") == 1
    small.finish(reads)
    small.put(ANNA, "y")
    assert small.orders() == []
    assert small.names(small.forgets) == ["k0"]


def test_blocks_being_written_are_not_given_up():
    small = SmallSpill(drives=(1,))
    for i in range(16):
        small.put(ANNA, [f"k{i}"])
    moves = small.orders()
    small.put(ANNA, "x")
    assert small.orders() == []
    assert small.forgets == []
    small.finish(moves)


def test_while_no_drive_takes_writes_nothing_is_given_up():
    small = full_drive()
    small.store.drop(small.namespace, small.keys(["k13"]))
    small.settle()
    small.put(ANNA, "x")
    small.finish(small.orders(), MoveProblem.NO_SPACE)

    for name in ("y", "z"):
        small.put(ANNA, name)
    small.store.tick(0.5)

    assert small.orders(0.5) == []
    assert small.forgets == []
    assert small.counter("nvme_evicted_blocks_total") == 0
    small.store.tick(DRIVE_RETRY_S[0])
    assert small.names(small.orders(DRIVE_RETRY_S[0])) == ["y"], "what was committed meanwhile has waited"


def test_a_larger_model_gets_room_on_a_full_drive():
    """A block of another size can use no single freed slot; whole segments have to run empty."""
    small = full_drive()
    large = small.open(spec(pages=16, weights="large"))
    small.put(ANNA, ["big"], namespace=large)
    assert small.names(small.settle()) == ["big"]
    assert small.counter("nvme_evicted_blocks_total") == 16


# --- failed writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", sorted(BAD_SLOT))
def test_a_slot_that_failed_is_never_used_again(problem: MoveProblem):
    small = SmallSpill(drives=(1,))
    small.put(ANNA, "a")
    failed = small.orders()
    small.finish(failed, problem)

    small.orders()
    forget = small.forgets[0]
    assert (forget.problem, forget.offset, forget.nbytes) == (problem, failed[0].record.offset, PAGE)
    assert forget.generation == failed[0].record.generation
    small.commit_index()
    assert (small.nvme().quarantined_bytes, small.nvme().limbo_bytes) == (PAGE, 0)
    small.store.tick(2.0)
    names = [f"k{i}" for i in range(16)]
    small.put(ANNA, names, now_s=2.0)
    written = small.orders(2.0)
    assert small.names(written) == names[:15]
    assert forget.offset not in {move.record.offset for move in written}
    assert small.counter(f"failed_writes_{problem}_total") == 1
    assert small.counter("demoted_blocks_total") == 0


@pytest.mark.parametrize("problem", [*HARMLESS, MoveProblem.STOPPED])
def test_the_slot_of_a_write_that_failed_for_another_reason_is_free_at_once(problem: MoveProblem):
    small = SmallSpill()
    small.put(ANNA, "a")
    small.finish(small.orders(), problem)
    assert small.orders() == []
    assert small.forgets == [], "the index never heard of it"
    assert small.nvme().free_bytes == small.nvme().capacity_bytes
    assert small.tiers_of("a") == [0]
    assert small.counter(f"failed_writes_{problem}_total") == 1


@pytest.mark.parametrize("problem", [*HARMLESS, *sorted(BAD_SLOT)])
def test_a_drive_that_refused_a_write_is_left_alone_for_a_while_the_other_goes_on(problem: MoveProblem):
    small = SmallSpill()
    small.put(ANNA, "a")
    (move,) = small.orders()
    small.finish([move], problem)

    small.put(ANNA, "bcde")
    assert {drive_of(move) for move in small.settle(0.9)} == {1}
    small.store.tick(DRIVE_RETRY_S[0] - 0.01)
    small.put(ANNA, "fg", parent="e")
    assert {drive_of(move) for move in small.settle(0.9)} == {1}
    small.store.tick(DRIVE_RETRY_S[0])
    small.put(ANNA, "hi", parent="g")
    assert {drive_of(move) for move in small.settle(1.0)} == {0, 1}


def test_the_cleaner_wants_a_block_again_whose_write_failed_also_while_it_is_read():
    small = SmallSpill(write_policy="write_back")
    for chain in "abcdefg":
        small.put(ANNA, [f"{chain}{i}" for i in range(8)])
        small.acquire(BERT, [f"{chain}{i}" for i in range(8)])
    small.store.tick(0.0)
    first = small.orders()
    small.finish(first, MoveProblem.READ_ONLY)
    small.store.tick(DRIVE_RETRY_S[0])
    assert small.names(small.orders(DRIVE_RETRY_S[0])) == small.names(first) == [f"a{i}" for i in range(8)]


def refuse(small: SmallSpill, name: str, now_s: float) -> bool:
    """Whether the drive was tried; it refuses again."""
    small.store.tick(now_s)
    small.put(ANNA, [name], now_s=now_s)
    moves = small.orders(now_s)
    small.finish(moves, MoveProblem.READ_ONLY, now_s)
    return bool(moves)


def test_the_pause_doubles_up_to_the_longest_and_a_success_makes_it_short_again():
    small = SmallSpill(drives=(16,))
    now_s, tried = 0.0, []
    while len(tried) < 9:
        if refuse(small, f"k{now_s}", now_s):
            tried.append(now_s)
        now_s += 0.5
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]

    now_s = tried[-1] + DRIVE_RETRY_S[1]
    small.store.tick(now_s)
    assert small.settle(now_s)
    assert refuse(small, "last", now_s)
    assert not refuse(small, "x", now_s + 0.5)
    assert refuse(small, "y", now_s + 1.0)


def test_writes_that_fail_together_are_one_refusal():
    small = SmallSpill(drives=(4,))
    small.put(ANNA, "abcd")
    small.finish(small.orders(), MoveProblem.NO_SPACE)
    assert refuse(small, "x", DRIVE_RETRY_S[0])


def test_a_write_that_ends_well_just_after_one_that_did_not_leaves_the_drive_to_its_pause():
    """Both were begun before. The drive is opened again when its time comes, and not before."""
    small = SmallSpill(drives=(4,))
    small.put(ANNA, "ab")
    failed, good = small.orders()
    small.finish([failed], MoveProblem.NO_SPACE)
    small.finish([good])

    small.put(ANNA, "x")
    assert small.orders() == []
    small.store.tick(DRIVE_RETRY_S[0])
    assert small.orders(DRIVE_RETRY_S[0])


def test_a_write_that_ends_well_after_the_pause_opens_the_drive():
    small = SmallSpill(drives=(4,))
    small.put(ANNA, "ab")
    failed, good = small.orders()
    small.finish([failed], MoveProblem.NO_SPACE)
    small.finish([good], now_s=DRIVE_RETRY_S[0])
    small.put(ANNA, "x")
    assert small.orders(DRIVE_RETRY_S[0])


def test_a_drive_is_not_left_alone_because_the_tier_stops():
    small = SmallSpill(drives=(1,))
    small.put(ANNA, "a")
    small.finish(small.orders(), MoveProblem.STOPPED)
    small.put(ANNA, "b")
    assert small.names(small.orders()) == ["b"]


def test_a_drive_whose_removals_hang_stops_no_write_to_the_others():
    small = SmallSpill(num_segments=8, drives=(1, 1))
    for i in range(32):
        small.put(ANNA, [f"k{i}"])
    small.settle()
    written: list[Move] = []

    for i in range(8):
        small.put(ANNA, [f"n{i}"])
        for _ in range(6):
            moves = small.orders()
            small.finish(moves)
            written += moves
            done = [forget for forget in small.forgets if forget.offset >> DRIVE_SHIFT == 1]
            small.forgets = [forget for forget in small.forgets if forget not in done]
            small.store.finish_forgets(done)

    assert small.names(written) == [f"n{i}" for i in range(8)]
    assert {drive_of(move) for move in written} == {1}
