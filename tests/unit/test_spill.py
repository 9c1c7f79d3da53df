"""From RAM to the drives: what is written when, and in which order. A block is a page; orders are carried out by hand.

Drives that are full or fail are in test_spill_full.py, reads in test_spill_reads.py, restarts in test_spill_start.py.
"""

import pytest
from small_spill import SmallSpill, drive_of
from small_store import PAGE, SEGMENT, spec

from kvstore.core.blocks import Holder, KeyStatus
from kvstore.core.events import BlockRemoved, BlockStored, RemovalReason
from kvstore.core.moves import BAD_SLOT, MoveProblem, Urgency

ANNA, BERT = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2)


def chains(count: int, length: int) -> list[list[str]]:
    """Names of sequences that share nothing."""
    return [[f"{chain}.{i}" for i in range(length)] for chain in range(count)]


# --- when a block is written -----------------------------------------------------------------------------------------


def test_write_through_writes_what_was_committed():
    small = SmallSpill()
    grant = small.reserve(ANNA, "abcd")
    assert small.orders() == []

    small.store.commit(ANNA, grant.lease_id, small.keys("abc"), 0.0)
    moves = small.orders()

    assert small.names(moves) == ["a", "b", "c"]
    assert small.orders() == []
    assert {move.urgency for move in moves} == {Urgency.WRITE}
    assert [move.arena_offset for move in moves] == [extent.offset for extent in grant.extents[:3]]
    assert small.counter("demoted_blocks_total") == 0
    small.finish(moves)
    assert small.counter("demoted_blocks_total") == 3


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_block_that_was_committed_before_its_parent_is_written_when_that_is_committed_too(policy: str):
    """Two engines that prefill the same prefix at once."""
    small = SmallSpill(num_segments=1, write_policy=policy)
    first = small.reserve(ANNA, "ab")
    small.put(BERT, "abcdefghijklmn")
    small.store.tick(0.0)
    assert small.settle() == []

    small.store.commit(ANNA, first.lease_id, None, 0.0)

    small.store.tick(0.0)
    assert sorted(small.names(small.settle())) == list("abcdefghijklmn")


def test_what_waited_for_an_ancestor_does_not_exceed_the_backlog(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITE_BACKLOG_BLOCKS", 4)
    small = SmallSpill(bytes_per_day=1)
    first = small.reserve(ANNA, "a")
    for name in "bcde":
        small.put(BERT, name, parent="a")
        assert small.orders() == []
    small.put(ANNA, "wxyz")

    small.store.commit(ANNA, first.lease_id, None, 0.0)

    assert len(small.store._spill._backlog) == 4
    assert small.counter("skipped_writes_backlog_total") == 5


def test_what_waits_for_an_ancestor_is_forgotten_with_it():
    small = SmallSpill()
    first = small.reserve(ANNA, "ab")
    small.put(BERT, "abc")
    assert small.settle() == []
    small.store.drop(small.namespace, None)
    small.store.commit(ANNA, first.lease_id, None, 0.0)
    small.put(ANNA, "xyz")
    assert small.names(small.settle()) == ["x", "y", "z"]


@pytest.mark.parametrize("pages", [9, 10])
def test_write_back_loses_nothing_to_eviction_whatever_a_segment_has_no_room_for(pages: int):
    """Of 16 pages, a block of 9 leaves 7 that no block of its size can have."""
    small = SmallSpill(num_segments=16, drives=(64,), write_policy="write_back")
    namespace = small.open(spec(pages=pages, weights="large"))
    for i in range(40):
        small.put(ANNA, [f"k{i}"], namespace=namespace)
        small.store.tick(float(i))
        small.settle(float(i))
    assert small.counter("evicted_blocks_total") == 24
    assert small.counter("lost_blocks_total") == 0


def test_a_record_says_what_a_restart_needs():
    small = SmallSpill(first_sequence=700)
    small.put(ANNA, "ab")
    a, b = (move.record for move in small.orders())
    assert (a.namespace, a.key, a.parent) == (small.namespace, small.keys("a")[0], b"")
    assert (b.namespace, b.key, b.parent) == (small.namespace, *small.keys("ba"))
    assert (a.nbytes, a.checksum, a.hits) == (small.spec.block_nbytes, 0, 0)
    assert a.last_use > b.last_use > 700, "the head is more recent than its tail"
    assert a.generation != b.generation
    assert small.each[0].reserved_bytes == small.each[1].reserved_bytes == PAGE


def test_a_namespace_is_made_known_once_with_its_first_write():
    small = SmallSpill()
    other = small.open(spec(weights="other"))
    assert not any(small.store.take_orders(0.0))
    small.put(ANNA, "a")
    small.put(ANNA, "a", namespace=other)
    orders = small.store.take_orders(0.0)
    small.finish(orders.moves)
    assert [namespace for namespace, _, _ in orders.namespaces] == [small.namespace, other]
    assert orders.namespaces[0] == (small.namespace, "", small.spec.canonical())

    small.put(ANNA, "bc")

    assert len(small.orders()) == 2
    assert small.namespaces == []


def test_selective_writes_a_block_when_it_is_read_for_the_first_time():
    small = SmallSpill(write_policy="write_through_selective")
    small.put(ANNA, "abc")
    assert small.match("abc") == 3
    small.store.tick(0.0)
    assert small.orders() == []

    small.acquire(BERT, "ab")
    small.acquire(ANNA, "ab")
    first = small.settle()
    small.acquire(BERT, "ab")

    assert small.names(first) == ["a", "b"]
    assert small.orders() == []


def test_write_back_writes_only_when_less_than_a_quarter_of_the_arena_is_free():
    small = SmallSpill(write_policy="write_back")
    *most, last = chains(7, 7)
    for names in most:
        small.put(ANNA, names)
        small.acquire(BERT, names)
        small.store.tick(0.0)
        assert small.orders() == []  # 22 of 64 pages are still free, a quarter are 16

    small.put(ANNA, last)
    small.store.tick(0.0)

    assert small.names(small.orders()) == most[0], "15 are free, so the coldest sequence is written"


def test_write_back_writes_the_coldest_first_until_a_quarter_is_free_or_clean_and_nothing_twice():
    small = SmallSpill(write_policy="write_back")
    first, second, third, *rest = chains(7, 8)
    for names in (first, second, third, *rest):
        small.put(ANNA, names)
    small.match(first)  # now the second is the coldest

    small.store.tick(0.0)
    moves = small.orders()
    small.store.tick(0.5)
    assert small.orders() == [], "what is being written counts as written"
    small.finish(moves)
    small.store.tick(1.0)
    assert small.orders() == []

    assert small.names(moves) == second
    small.put(ANNA, "abcdefgh")
    small.store.tick(1.5)
    assert small.names(small.orders()) == third


def test_what_write_back_has_written_is_what_a_burst_evicts():
    small = SmallSpill(write_policy="write_back")
    for names in chains(7, 8):
        small.put(ANNA, names)
    small.store.tick(0.0)
    small.settle()

    small.put(ANNA, [f"burst{i}" for i in range(16)])

    assert small.counter("evicted_blocks_total") == 8
    assert small.counter("lost_blocks_total") == 0
    small.put(ANNA, [f"more{i}" for i in range(8)])
    assert small.counter("lost_blocks_total") == 8


def test_the_cleaner_waits_for_what_it_asked_for_before():
    """While its last wish waits for the budget, the next tick wishes nothing more."""
    small = SmallSpill(write_policy="write_back", bytes_per_s=PAGE)
    for names in chains(15, 4):
        small.put(ANNA, names)
    small.store.tick(0.0)
    written = []
    for second in range(20):
        small.store.tick(float(second))
        written += small.settle(float(second))
    assert small.names(written) == [name for names in chains(3, 4) for name in names]


def test_write_through_tries_again_later_what_could_not_be_written_then(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITING_FRACTION", 1.0)
    small = SmallSpill()
    for names in chains(7, 8):
        small.put(ANNA, names)
    small.finish(small.orders(), MoveProblem.NO_SPACE)
    small.store.tick(2.0)
    assert small.names(small.orders(2.0)) == chains(1, 8)[0]


def test_a_drive_that_hangs_keeps_no_more_than_a_part_of_the_arena_from_eviction():
    small = SmallSpill()
    for names in chains(7, 8):
        small.put(ANNA, names)
    assert len(small.orders()) == 16  # of 64
    assert small.orders() == []

    small.put(ANNA, [f"burst{i}" for i in range(48)])

    assert small.match([f"burst{i}" for i in range(48)]) == 48


def test_selective_never_writes_ahead():
    small = SmallSpill(write_policy="write_through_selective")
    for names in chains(8, 8):
        small.put(ANNA, names)
    small.store.tick(0.0)
    assert small.orders() == []


def test_before_the_start_nothing_is_written_and_afterwards_what_was_missed():
    small = SmallSpill(start=False)
    small.put(ANNA, "abc")
    small.store.tick(0.0)
    assert not any(small.store.take_orders(0.0))
    small.start()
    assert small.names(small.orders()) == ["a", "b", "c"]


def test_before_the_start_nothing_is_cleaned_since_it_is_not_known_what_is_on_the_drives():
    small = SmallSpill(start=False, write_policy="write_back")
    first, second, *rest = chains(7, 8)
    for names in (first, second, *rest):
        small.put(ANNA, names)
    small.store.tick(0.0)
    small.restore(second)
    small.start()
    assert small.orders() == []
    small.store.tick(0.5)
    assert small.orders() == [], "eight are free and eight are on the drives"
    small.put(ANNA, "x")
    small.store.tick(1.0)
    assert small.names(small.orders()) == first


# --- in which order ---------------------------------------------------------------------------------------------------


def test_a_wanted_leaf_brings_its_ancestors_and_comes_behind_them():
    small = SmallSpill(write_policy="write_through_selective")
    small.put(ANNA, "abcd")
    small.acquire(BERT, "abcd", first_needed=3)
    assert small.names(small.orders()) == ["a", "b", "c", "d"]


def test_a_block_is_written_behind_its_parent_even_when_its_commit_came_first():
    small = SmallSpill()
    grant = small.reserve(ANNA, "abc")
    small.store.commit(ANNA, grant.lease_id, small.keys("c"), 0.0)
    assert small.orders() == [], "in front of it there is nothing yet"
    small.store.commit(ANNA, grant.lease_id, small.keys("b"), 0.0)
    assert small.orders() == []

    small.store.commit(ANNA, grant.lease_id, small.keys("a"), 0.0)
    assert small.names(small.orders()) == ["a", "b", "c"]
    small.put(ANNA, "d", parent="c")
    assert small.names(small.orders()) == ["d"]


def test_a_block_without_its_parent_is_not_written():
    small = SmallSpill()
    grant = small.reserve(ANNA, "abc")
    small.store.commit(ANNA, grant.lease_id, small.keys("bc"), 0.0)
    small.store.abort(ANNA, grant.lease_id, 0.0)
    assert small.orders() == []
    assert small.nvme().ready_blocks == 0


def test_blocks_go_to_the_drives_in_turn():
    small = SmallSpill()
    small.put(ANNA, "abcd")
    assert [drive_of(move) for move in small.orders()] == [0, 1, 0, 1]


def test_a_turn_orders_no_more_than_so_many_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill._MAX_RUN_BLOCKS", 2)
    monkeypatch.setattr("kvstore.spill.MAX_WRITES_PER_TURN", 4)
    small = SmallSpill()
    small.put(ANNA, [f"k{i}" for i in range(10)])

    moves = small.orders()
    assert small.names(moves) == ["k0", "k1", "k2", "k3"]
    small.finish(moves[:1])
    assert small.names(small.orders()) == ["k4", "k5", "k6", "k7"]
    small.finish(moves[1:2])
    assert small.names(small.orders()) == ["k8", "k9"]


def test_the_cleaner_wants_a_long_sequence_from_its_head(monkeypatch: pytest.MonkeyPatch):
    """So that nobody walks up all of it for each part that is written."""
    small = SmallSpill(num_segments=1, write_policy="write_back")
    small.put(ANNA, [f"k{i}" for i in range(16)])
    small.store.tick(0.0)
    lengths: list[int] = []
    walk = small.store._spill._unwritten_chain

    def noting(row: int, key: bytes, *run: object) -> list[int]:
        lengths.append(len(chain := walk(row, key, *run)))  # type: ignore[arg-type]
        return chain

    monkeypatch.setattr(small.store._spill, "_unwritten_chain", noting)
    assert len(small.settle()) == 16
    assert max(lengths) == 1


def test_writes_in_flight_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITES_IN_FLIGHT_BYTES", 3 * PAGE)
    small = SmallSpill()
    for name in "abcd":
        small.put(ANNA, name)
    small.put(ANNA, "efgh")

    first = small.orders()
    assert small.names(first) == ["a", "b", "c"]
    assert small.orders() == []
    small.finish(first[:1])
    assert small.names(small.orders()) == ["d"]
    small.finish(first[1:])
    assert small.names(small.orders()) == ["e", "f"]


def test_a_long_chain_is_written_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITES_IN_FLIGHT_BYTES", 3 * PAGE)
    small = SmallSpill(write_policy="write_through_selective")
    small.put(ANNA, "abcdefgh")
    small.acquire(BERT, "abcdefgh", first_needed=7)
    parts = []
    while moves := small.orders():
        parts.append("".join(small.names(moves)))
        small.finish(moves)
    assert parts == ["abc", "def", "gh"]


def test_a_failed_write_is_in_flight_no_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITES_IN_FLIGHT_BYTES", PAGE)
    small = SmallSpill()
    small.put(ANNA, "a")
    small.finish(small.orders(), MoveProblem.STOPPED)
    small.put(ANNA, "b")
    assert small.names(small.settle()) == ["a", "b"]


def test_a_backlog_that_is_too_long_loses_its_oldest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITE_BACKLOG_BLOCKS", 3)
    small = SmallSpill()
    for name in "abcde":
        small.put(ANNA, name)
    assert small.names(small.orders()) == ["c", "d", "e"]
    assert small.counter("skipped_writes_backlog_total") == 2


def test_a_row_that_became_another_blocks_while_it_waited_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITES_IN_FLIGHT_BYTES", PAGE)
    small = SmallSpill(write_policy="write_through_selective")
    for name in "ab":
        small.put(ANNA, name)
        small.store.release(BERT, small.acquire(BERT, name).lease_id, 0.0)
    first = small.orders()
    assert small.names(first) == ["a"]

    small.store.drop(small.namespace, small.keys("b"))
    small.put(ANNA, "c")  # in the row that was b's, and nobody has read it
    small.finish(first)

    assert small.orders() == []


def test_a_block_that_went_while_it_waited_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_WRITES_IN_FLIGHT_BYTES", PAGE)
    small = SmallSpill()
    for name in "abc":
        small.put(ANNA, name)
    first = small.orders()
    small.store.drop(small.namespace, small.keys("b"))
    small.finish(first)
    assert small.names(small.orders()) == ["c"]


# --- budget -----------------------------------------------------------------------------------------------------------


def test_the_rate_is_kept_and_a_chain_goes_on_where_it_stopped():
    small = SmallSpill(bytes_per_s=2 * PAGE)
    small.put(ANNA, "abcdefgh")
    assert small.names(small.settle(10.0)) == ["a", "b"]
    assert small.settle(10.0) == []
    assert small.names(small.settle(10.5)) == ["c"]
    assert small.names(small.settle(90.0)) == ["d", "e"]


def test_a_day_s_worth_counts_what_was_written_before_the_restart():
    small = SmallSpill(bytes_per_day=3 * PAGE, start=False)
    small.start({99: PAGE, 50: 100 * PAGE}, wall_offset_s=100 * 3600.0)
    small.put(ANNA, "abcd")
    assert small.names(small.settle(0.0)) == ["a", "b"]
    assert small.settle(23 * 3600.0) == []
    assert small.names(small.settle(24 * 3600.0)) == ["c"]  # what was written in hour 99 counts no more
    assert small.names(small.settle(25 * 3600.0)) == ["d"]


# --- drop -------------------------------------------------------------------------------------------------------------


def test_a_block_dropped_while_it_is_written_is_removed_when_it_was_written():
    small = SmallSpill()
    small.put(ANNA, "ab")
    moves = small.orders()
    assert small.store.drop(small.namespace, small.keys("b")) == 1
    assert small.match("ab") == 1
    assert small.orders() == []
    assert small.forgets == [], "its entry does not exist yet"
    assert (small.nvme().leaving_bytes, small.tier().leaving_bytes) == (PAGE, PAGE)

    small.finish(moves)
    small.orders()

    assert small.names(small.forgets) == ["b"]
    assert (small.nvme().limbo_bytes, small.tier().leaving_bytes) == (PAGE, 0)
    assert small.counter("demoted_blocks_total") == 1
    small.commit_index()
    assert (small.nvme().limbo_bytes, small.nvme().ready_bytes) == (0, PAGE)


@pytest.mark.parametrize("problem", [MoveProblem.EIO, MoveProblem.NO_SPACE])
def test_a_block_dropped_while_its_write_fails_leaves_nothing_but_a_bad_slot(problem: MoveProblem):
    small = SmallSpill()
    small.put(ANNA, "a")
    moves = small.orders()
    small.store.drop(small.namespace, small.keys("a"))
    small.finish(moves, problem)
    small.orders()
    assert [forget.problem for forget in small.forgets] == [problem] * (problem in BAD_SLOT)
    assert small.tier().free_bytes == small.tier().capacity_bytes
    assert small.nvme().quarantined_bytes == PAGE * (problem in BAD_SLOT)


def test_drop_takes_both_copies_and_counts_a_block_once():
    small = SmallSpill()
    small.put(ANNA, "abc")
    small.settle()
    assert small.store.drop(small.namespace, small.keys("b")) == 2
    small.orders()
    assert sorted(small.names(small.forgets)) == ["b", "c"]
    assert small.match("abc") == 1
    assert small.reserve(ANNA, "abc").statuses == (KeyStatus.HELD, KeyStatus.GRANTED, KeyStatus.GRANTED)


def test_a_block_evicted_from_ram_while_it_is_written_is_not():
    small = SmallSpill(num_segments=1)
    small.put(ANNA, "a")
    moves = small.orders()
    grant = small.reserve(ANNA, [f"k{i}" for i in range(16)])
    assert list(grant.statuses).count(KeyStatus.GRANTED) == 15
    small.finish(moves)


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_recency_that_changed_is_given_once_and_only_of_blocks_on_the_drives():
    small = SmallSpill()
    small.put(ANNA, "abc")
    small.settle()
    small.store.take_touches()
    assert small.store.take_touches() == []
    small.put(ANNA, "xyz")
    small.match("ab")
    small.acquire(BERT, "a")

    touches = small.store.take_touches()

    by_key = {touch.key: touch for touch in touches}
    a, b = (by_key[key] for key in small.keys("ab"))
    assert len(touches) == 2
    assert (a.hits, b.hits) == (1, 0)
    assert a.last_use > b.last_use
    assert a.namespace == small.namespace
    assert {a.offset, b.offset} < {0, 1 << 48, PAGE}
    assert small.store.take_touches() == []


def test_much_changed_recency_is_given_in_parts_the_oldest_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.spill.MAX_TOUCHES_PER_TURN", 2)
    small = SmallSpill()
    small.put(ANNA, "abcde")
    small.settle()
    parts = [[touch.key for touch in small.store.take_touches()] for _ in range(4)]
    assert parts == [small.keys("ed"), small.keys("cb"), small.keys("a"), []]


def test_stats_add_up_whatever_state_blocks_are_in():
    small = SmallSpill(drives=(1, 1))
    small.put(ANNA, "abcdef")
    a, b, *rest = small.orders()
    small.finish([a])
    small.finish([b], MoveProblem.EIO)
    small.store.drop(small.namespace, small.keys("e"))
    small.finish(rest[:1])
    assert small.nvme()[1:] == (2 * SEGMENT, 2 * PAGE, PAGE, 2 * PAGE, 0, 26 * PAGE, 2, PAGE, 1, 2)
    small.finish(rest[1:])
    assert small.nvme()[1:] == (2 * SEGMENT, 3 * PAGE, 0, 0, 2 * PAGE, 26 * PAGE, 3, PAGE, 0, 0)
    small.settle()
    assert small.nvme()[1:] == (2 * SEGMENT, 3 * PAGE, 0, 0, 0, 28 * PAGE, 3, PAGE, 0, 0)
    assert small.nvme().name == "nvme"
    assert small.store.stats().num_blocks == 4


def test_without_drives_there_is_one_tier_and_nothing_is_ordered():
    small = SmallSpill(drives=(1,))
    assert len(small.store.stats().tiers) == 2
    no_drives = SmallSpill(drives=())
    no_drives.put(ANNA, "abc")
    no_drives.store.tick(1.0)
    assert not any(no_drives.store.take_orders(1.0))
    assert no_drives.nvme().capacity_bytes == 0


def test_events_tell_when_a_block_is_on_a_drive_and_when_it_is_not_any_more():
    small = SmallSpill()
    size = small.spec.block_nbytes
    small.put(ANNA, "ab")
    moves = small.orders()
    small.events.clear()
    small.finish(moves)
    small.store.drop(small.namespace, small.keys("b"))
    a, b = small.keys("ab")
    assert [event for event in small.events if event.tier == "nvme"] == [
        BlockStored(small.namespace, "nvme", b"", (a,), size),
        BlockStored(small.namespace, "nvme", a, (b,), size),
        BlockRemoved(small.namespace, "nvme", (b,), size, RemovalReason.DROPPED),
    ]
