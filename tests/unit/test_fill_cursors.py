"""Front and back of a load: each block is exactly one side's, and none is left, in whatever order they come to it."""

import random
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine_connector.fill_cursors import FillCursors

EVENTS = st.lists(
    st.one_of(st.tuples(st.just("claim"), st.integers(1, 12)), st.sampled_from(["begin", "good", "bad", "end"]))
)


@settings(max_examples=400, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    front_blocks=st.none() | st.integers(0, 12),
    meet_block=st.none() | st.integers(0, 12),
    events=EVENTS,
    seconds=st.lists(st.floats(0, 3), min_size=100, max_size=100),
)
def test_each_block_is_one_sides_and_none_is_lost(num_blocks, front_blocks, meet_block, events, seconds) -> None:
    cursors = FillCursors(num_blocks, front_blocks=front_blocks, meet_block=meet_block, expected_s=1.0)
    fronts: set[int] = set()
    backs: set[int] = set()
    claimed = elapsed_s = 0
    copying: int | None = None
    ended = False
    for event, step_s in zip(events, seconds, strict=False):
        elapsed_s += step_s
        if isinstance(event, tuple):
            got = cursors.claim_front(event[1], elapsed_s)
            assert got <= event[1]
            claimed = max(claimed, got)
            assert min(event[1], claimed) == got, "what was granted stays granted"
            fronts |= set(range(got))
        elif event == "begin" and copying is None:
            if cursors.claim_back():
                copying = cursors.back - 1
            else:
                assert ended or cursors.met
        elif event in ("good", "bad") and copying is not None:
            cursors.copied(good=event == "good")
            backs |= {copying} if event == "good" else set()
            ended, copying = ended or event == "bad", None
        elif event == "end" and copying is None:
            cursors.end()
            ended = True
        cursors.check()
        held = {copying} if copying is not None else set()
        assert fronts.isdisjoint(backs | held)
        assert backs == set(range(cursors.back, num_blocks))

    if copying is not None:
        cursors.copied(good=True)
        backs.add(copying)
    cursors.end()
    fronts |= set(range(cursors.claim_front(num_blocks, elapsed_s)))

    assert fronts | backs == set(range(num_blocks))
    assert fronts.isdisjoint(backs)
    assert cursors.met


def test_two_threads_share_all_blocks() -> None:
    """The same, with both sides at work."""
    for seed in range(20):
        rng = random.Random(seed)
        num_blocks = rng.randrange(50, 400)
        cursors = FillCursors(num_blocks, meet_block=rng.randrange(num_blocks))
        copied: list[int] = []

        def copy(cursors: FillCursors = cursors, copied: list[int] = copied) -> None:
            while cursors.claim_back():
                copied.append(cursors.back - 1)
                cursors.copied(good=True)

        thread = threading.Thread(target=copy)
        thread.start()
        computed = 0
        while not cursors.met:
            computed = cursors.claim_front(min(computed + 8, num_blocks))
            cursors.check()
        thread.join(10.0)

        assert not thread.is_alive()
        assert computed + len(copied) == num_blocks
        assert copied == list(range(num_blocks - 1, computed - 1, -1))


def test_where_others_wait_the_front_stays_at_its_bound_while_blocks_come_in_time() -> None:
    cursors = FillCursors(20, front_blocks=5, meet_block=5, expected_s=1.0)

    assert cursors.claim_front(8, 0.0) == 5
    for _ in range(9):
        cursors.claim_back(), cursors.copied(good=True)
    assert cursors.claim_front(20, 1.0) == 5, "half of the 15 are due after the expected time"
    assert cursors.claim_front(20, 1.5) == 11


def test_a_drive_that_stalls_is_found_out_before_the_load_should_be_over() -> None:
    cursors = FillCursors(20, front_blocks=5, meet_block=5, expected_s=1.0)

    assert cursors.claim_front(20, 0.5) == 5
    assert cursors.claim_front(20, 0.6) == 20


def test_an_idle_engine_ends_its_chunk_when_the_back_gets_there() -> None:
    """By what both have done: three to one, so three quarters of what is left."""
    cursors = FillCursors(100, meet_block=75)
    assert cursors.claim_front(30) == 30
    for _ in range(10):
        cursors.claim_back(), cursors.copied(good=True)

    assert cursors.claim_front(100) == 30 + 45


def test_an_idle_engine_never_waits_for_a_block_that_nobody_copies() -> None:
    """Though it was expected to get none: the drive stalls."""
    cursors = FillCursors(10, meet_block=0)

    claims = [cursors.claim_front(10) for _ in range(4)]

    assert claims == [1, 4, 8, 10]
