"""From the drives to RAM: what is ordered once for all, when readers see it, and what becomes of them when it fails. A block
is a page; orders are carried out by hand."""

import pytest
from small_spill import SmallSpill, drive_of
from small_store import PAGE, SEGMENT

from kvstore.core.blocks import Holder, KeyStatus
from kvstore.core.errors import LeaseExpired, LeaseRefused, ProtocolError, UnknownLease
from kvstore.core.events import BlockRemoved, RemovalReason
from kvstore.core.moves import BAD_SLOT, FAILURES, MoveProblem, Urgency
from kvstore.core.plans import NOWHERE

ANNA, BERT, CLEO = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2), Holder(b"cleo" * 4, 3)
BAD = sorted(BAD_SLOT)
EVERY_FAILURE = sorted(FAILURES)
HARMLESS = sorted(FAILURES - BAD_SLOT)


# --- what is ordered --------------------------------------------------------------------------------------------------


def test_a_prefix_that_lies_on_drives_is_found_there_and_ordered_by_who_acquires_it():
    small = SmallSpill(restored="abcd")
    assert small.tiers_of("abcdx") == [1, 1, 1, 1]
    assert small.orders() == []

    grant = small.acquire(ANNA, "abcdx", first_needed=1)
    moves = small.orders()

    assert (grant.num_blocks, grant.ready) == (4, b"\0\0\0")
    assert small.names(moves) == ["b", "c", "d"]
    assert {move.urgency for move in moves} == {Urgency.READ}
    assert [move.arena_offset for move in moves] == [extent.offset for extent in grant.extents]
    assert [drive_of(move) for move in moves] == [1, 0, 1]
    assert small.orders() == []
    assert small.tier().writing_bytes == 3 * PAGE


def test_each_key_is_looked_up_by_itself_on_both_tiers():
    """Also what is arriving or being written, which is in the way of a prefix."""
    small = SmallSpill(restored="acd")
    small.put(ANNA, "gh")
    small.reserve(ANNA, "w")
    small.acquire(BERT, "c")  # arrives

    match = small.store.match_each(small.namespace, small.keys("xacwgdh"))

    assert match.tiers == bytes([NOWHERE, 1, 1, NOWHERE, 0, 1, 0])
    assert match.num_blocks == 0
    assert small.store.match_each(small.namespace, []).tiers == b""
    assert SmallSpill().store.match_each(small.namespace, small.keys("xy")).tiers == bytes([NOWHERE] * 2)


def test_the_order_has_the_record_that_was_written():
    small = SmallSpill(num_segments=1)
    small.put(ANNA, "ab")
    writes = small.orders()
    small.finish(writes)
    small.put(ANNA, [f"k{i}" for i in range(16)])
    assert small.tiers_of("ab") == [1, 1]
    small.settle()

    small.acquire(ANNA, "ab")
    reads = small.orders()

    for write, read in zip(writes, reads, strict=True):
        assert read.record.checksum == small.checksum(write)
        assert read.record._replace(checksum=0, last_use=0, hits=0) == write.record._replace(last_use=0, hits=0)


def test_what_is_in_ram_too_is_not_read():
    small = SmallSpill()
    small.put(ANNA, "ab")
    small.settle()
    assert small.acquire(BERT, "ab").ready == b"\1\1"
    assert small.store.prefetch(small.namespace, small.keys("ab"), 0, 0.0) == (2, 0)
    assert small.orders() == []


def test_fifty_readers_of_a_prefix_cost_one_read_of_each_block_and_are_told_together():
    small = SmallSpill(restored="abc")
    holders = [Holder(b"%016d" % i, i) for i in range(50)]
    grants = [small.acquire(holder, "abc") for holder in holders]
    moves = small.orders()
    assert small.names(moves) == ["a", "b", "c"]
    assert len({grant.slots.offsets.tobytes() for grant in grants}) == 1

    small.finish(moves[:2])
    assert all(small.announced(grant) == [True, True, False] for grant in grants)
    small.finish(moves[2:])

    assert all(small.announced(grant) == [True] * 3 for grant in grants)
    assert small.counter("promoted_blocks_total") == 3
    for holder, grant in zip(holders, grants, strict=True):
        small.store.release(holder, grant.lease_id, 0.0)
        small.store.check()
    assert small.tiers_of("abc") == [0, 0, 0]


def test_a_prefetched_block_is_joined_by_who_acquires_it():
    small = SmallSpill(restored="abcd")
    assert small.store.prefetch(small.namespace, small.keys("abcdx"), 1, 0.0) == (4, 3)
    moves = small.orders()
    assert small.names(moves) == ["b", "c", "d"]
    assert {move.urgency for move in moves} == {Urgency.PREFETCH}
    assert small.store.prefetch(small.namespace, small.keys("abcd"), 1, 0.0) == (4, 0)

    grant = small.acquire(ANNA, "abcd")

    assert grant.ready == b"\0\0\0\0"
    more = small.orders()
    assert small.names(more) == ["a"]
    small.finish(moves)
    assert small.announced(grant) == [False, True, True, True]
    small.finish(more)
    assert small.acquire(BERT, "abcd").ready == b"\1\1\1\1"


def test_prefetch_owns_nothing():
    small = SmallSpill(restored="ab")
    small.store.prefetch(small.namespace, small.keys("ab"), 0, 0.0)
    small.finish(small.orders())
    assert small.store.stats().num_leases == 0
    grant = small.reserve(ANNA, [f"k{i}" for i in range(64)])
    assert grant.statuses == (KeyStatus.GRANTED,) * 64


def test_prefetch_refuses_the_same_key_twice():
    small = SmallSpill(restored="ab")
    with pytest.raises(ProtocolError):
        small.store.prefetch(small.namespace, small.keys("aba"), 0, 0.0)
    assert small.orders() == []


def test_where_the_arena_has_no_room_the_run_ends():
    small = SmallSpill(num_segments=1, restored="abcd")
    names = [f"k{i}" for i in range(14)]
    small.put(ANNA, names)
    small.acquire(ANNA, names)
    small.settle()

    found = small.store.prefetch(small.namespace, small.keys("abcd"), 1, 0.0)
    grant = small.acquire(BERT, "abcd", first_needed=1)
    none = small.acquire(CLEO, "abcd")

    assert found == (4, 2)
    assert (grant.num_blocks, len(grant.extents)) == (3, 2)
    assert (none.lease_id, none.num_blocks) == (0, 0)
    assert small.names(small.orders()) == ["b", "c"]


@pytest.mark.parametrize("all_leased", [False, True])
def test_room_is_made_for_what_arrives_but_not_of_its_own_prefix(all_leased: bool):
    small = SmallSpill(num_segments=1)
    small.put(ANNA, "ab")
    small.settle()
    others = [f"k{i}" for i in range(15)]
    small.put(ANNA, others)  # b goes
    small.settle()
    assert small.tiers_of("ab") == [0, 1]
    if all_leased:
        small.acquire(ANNA, others)

    grant = small.acquire(BERT, "ab")

    assert grant.ready == (b"\1" if all_leased else b"\1\0")
    assert small.names(small.orders()) == ([] if all_leased else ["b"])


def test_a_block_on_its_way_may_not_be_evicted_before_somebody_could_read_it():
    small = SmallSpill(num_segments=1, restored="a")
    small.store.prefetch(small.namespace, small.keys("a"), 0, 0.0)
    moves = small.orders()
    grant = small.reserve(ANNA, [f"k{i}" for i in range(16)])
    assert list(grant.statuses).count(KeyStatus.GRANTED) == 15
    small.finish(moves)
    assert small.tiers_of("a") == [0]


def test_a_writer_finds_blocks_that_are_held_on_a_drive():
    """Those that lie on a drive only it may store anew; they have no second copy there."""
    small = SmallSpill(restored="abc")
    grant = small.reserve(ANNA, "de", parent="c")
    assert grant.statuses == (KeyStatus.GRANTED,) * 2
    small.store.commit(ANNA, grant.lease_id, None, 0.0)
    assert small.tiers_of("abcde") == [1, 1, 1, 0, 0]
    assert small.names(small.settle()) == ["d", "e"]

    again = small.reserve(BERT, "abc")
    assert again.statuses == (KeyStatus.GRANTED,) * 3
    small.store.commit(BERT, again.lease_id, None, 0.0)
    assert small.orders() == []
    assert small.tiers_of("abcde") == [0] * 5


def test_a_block_on_its_way_is_held():
    small = SmallSpill(restored="a")
    small.acquire(ANNA, "a")
    assert small.reserve(BERT, "ab").statuses == (KeyStatus.HELD, KeyStatus.GRANTED)


def test_what_an_engine_writes_anew_is_not_read_from_a_drive_meanwhile():
    small = SmallSpill(restored="ab")
    small.reserve(ANNA, "ab")
    assert small.match("ab") == 0
    assert small.acquire(BERT, "ab").lease_id == 0
    assert small.orders() == []


# --- when it can be read ----------------------------------------------------------------------------------------------


def test_the_generation_is_hidden_until_the_bytes_are_there():
    small = SmallSpill(restored="ab")
    grant = small.acquire(ANNA, "ab", request_id="r")
    (first, second) = small.orders()
    assert small.announced(grant) == [False, False]
    assert small.acquire(BERT, "ab").ready == b"\0\0"

    small.finish([second])

    assert small.announced(grant) == [False, True]
    assert small.acquire(ANNA, "ab", request_id="r").ready == b"\0\1"
    small.finish([first])
    assert small.acquire(ANNA, "ab", request_id="r").ready == b"\1\1"


@pytest.mark.parametrize("problem", EVERY_FAILURE)
def test_a_block_that_did_not_come_is_never_announced(problem: MoveProblem):
    small = SmallSpill(num_segments=1, restored="a")
    grant = small.acquire(ANNA, "a")
    small.finish(small.orders(), problem)
    assert small.announced(grant) == [False]
    assert small.put(BERT, [f"k{i}" for i in range(16)]).lease_id
    assert small.announced(grant) == [False]


# --- failed reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", EVERY_FAILURE)
def test_leases_give_up_what_did_not_come_and_keep_the_rest(problem: MoveProblem):
    small = SmallSpill(restored="abc")
    grants = [small.acquire(holder, "abc", request_id="r") for holder in (ANNA, BERT)]
    a, b, c = small.orders()
    small.finish([a])
    small.finish([b], problem)
    small.finish([c])

    assert small.counter(f"failed_reads_{problem}_total") == 1
    assert small.store.stats().num_leases == 2
    for holder, grant in zip((ANNA, BERT), grants, strict=True):
        assert small.announced(grant) == [True, False, True]
        assert small.acquire(holder, "abc", request_id="r").ready == b"\1\0\1"
        small.store.release(holder, grant.lease_id, 0.0)
        small.store.check()
    assert small.tier().ready_blocks == 2
    assert small.tier().free_bytes == 4 * SEGMENT - 2 * PAGE


@pytest.mark.parametrize("problem", EVERY_FAILURE)
def test_a_lease_with_nothing_left_has_ended(problem: MoveProblem):
    small = SmallSpill(restored="ab")
    grant = small.acquire(ANNA, "ab", request_id="r")
    moves = small.orders()
    small.finish(moves[:1], problem)
    assert small.store.renew(ANNA, [grant.lease_id], 1.0, 0.0) == []
    small.finish(moves[1:], problem)

    assert small.store.stats().num_leases == 0
    assert small.store.renew(ANNA, [grant.lease_id], 1.0, 0.0) == [grant.lease_id]
    with pytest.raises(UnknownLease):
        small.store.release(ANNA, grant.lease_id, 0.0)
    assert small.tier().free_bytes == small.tier().capacity_bytes


def test_a_lease_that_was_released_has_nothing_to_give_up():
    small = SmallSpill(restored="a")
    grant = small.acquire(ANNA, "a")
    small.acquire(BERT, "a")
    small.store.release(ANNA, grant.lease_id, 0.0)
    small.finish(small.orders(), MoveProblem.EIO)
    assert small.store.stats().num_leases == 0
    assert small.tier().free_bytes == small.tier().capacity_bytes


def test_an_expired_lease_gives_up_too_and_its_limbo_with_it():
    small = SmallSpill(num_segments=1, restored="abcdef", limbo_fraction=4 / 16)
    grant = small.acquire(ANNA, "abcdef", ttl_s=1.0)
    moves = small.orders()
    small.store.expire(1.0)
    with pytest.raises(LeaseRefused):
        small.acquire(ANNA, "abcdef", now_s=1.0)

    small.finish(moves[:1], MoveProblem.EIO, 1.0)
    with pytest.raises(LeaseRefused):
        small.put(ANNA, "x", now_s=1.0)
    small.finish(moves[1:2], MoveProblem.EIO, 1.0)
    small.put(ANNA, "x", now_s=1.0)
    assert small.store.instance_in_limbo(ANNA.instance)
    small.finish(moves[2:], MoveProblem.STOPPED, 1.0)

    assert not small.store.instance_in_limbo(ANNA.instance)
    assert small.store.stats().num_expired_leases == 0
    with pytest.raises(UnknownLease):
        small.store.release(ANNA, grant.lease_id, 1.0)


def test_a_block_that_came_for_an_expired_lease_stays_until_its_end_is_confirmed():
    small = SmallSpill(num_segments=1, restored="a")
    grant = small.acquire(ANNA, "a", ttl_s=1.0)
    moves = small.orders()
    small.store.expire(1.0)
    small.finish(moves, now_s=1.0)
    names = [f"k{i}" for i in range(16)]
    assert list(small.reserve(BERT, names, now_s=1.0).statuses).count(KeyStatus.GRANTED) == 15
    with pytest.raises(LeaseExpired):
        small.store.release(ANNA, grant.lease_id, 1.0)
    small.store.check()
    assert small.reserve(BERT, ["k15"], now_s=1.0).lease_id


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_slot_is_quarantined_and_its_block_is_lost(problem: MoveProblem):
    small = SmallSpill(restored="abc")
    small.acquire(ANNA, "abc")
    a, b, c = small.orders()
    small.finish([a, c])
    small.events.clear()
    small.finish([b], problem)

    assert small.tiers_of("abc") == [0]
    small.orders()
    (forget,) = small.forgets
    assert (forget.key, forget.offset) == (b.record.key, b.record.offset)
    assert (forget.generation, forget.problem) == (b.record.generation, problem)
    assert small.events == [BlockRemoved(small.namespace, "nvme", (b.record.key,), PAGE, RemovalReason.DAMAGED)]
    small.commit_index()
    nvme = small.nvme()
    assert (nvme.quarantined_bytes, nvme.limbo_bytes, nvme.ready_blocks) == (PAGE, 0, 2)
    assert nvme.free_bytes == nvme.capacity_bytes - 3 * PAGE

    small.put(ANNA, "b", parent="a")
    (written,) = small.settle()
    assert written.record.offset != b.record.offset
    assert small.tiers_of("abc") == [0, 0, 0]


def test_gone_is_not_lost_and_not_promised_for_a_while():
    small = SmallSpill(restored="abc")  # a and c on drive 0, b on drive 1
    small.acquire(ANNA, "abc")
    a, b, c = small.orders()
    small.finish([b, c])
    small.finish([a], MoveProblem.GONE, 10.0)

    assert small.match("abc") == 0
    assert small.store.prefetch(small.namespace, small.keys("abc"), 0, 10.0) == (0, 0)
    small.store.tick(14.9)
    assert small.match("abc") == 0
    assert small.orders(14.9) == []
    assert small.forgets == []
    assert small.nvme().quarantined_bytes == 0

    small.store.tick(15.0)
    assert small.tiers_of("abc") == [1, 0, 0]
    assert small.acquire(BERT, "abc", now_s=15.0).ready == b"\0\1\1"


def test_the_other_drive_is_read_while_one_is_gone():
    small = SmallSpill(start=False)
    small.restore("a")
    small.restore("b")  # on drive 1
    small.start()
    small.acquire(ANNA, "a")
    small.finish(small.orders(), MoveProblem.GONE)
    assert (small.match("a"), small.match("b")) == (0, 1)


def test_what_is_in_ram_is_read_while_its_drive_is_gone():
    small = SmallSpill(drives=(1,), restored="ab")
    small.put(ANNA, "a")
    small.acquire(BERT, "ab")
    small.finish(small.orders(), MoveProblem.GONE)
    assert small.tiers_of("ab") == [0]


@pytest.mark.parametrize("problem", HARMLESS)
def test_a_slot_is_not_blamed_for_what_its_drive_does(problem: MoveProblem):
    small = SmallSpill(restored="a")
    small.acquire(ANNA, "a")
    small.finish(small.orders(), problem)
    assert small.orders() == []
    assert small.forgets == []
    assert (small.nvme().ready_blocks, small.nvme().quarantined_bytes) == (1, 0)


def test_stopped_says_nothing_of_block_or_drive():
    small = SmallSpill(restored="ab")
    small.acquire(ANNA, "ab")
    small.finish(small.orders(), MoveProblem.STOPPED)
    assert small.tiers_of("ab") == [1, 1]
    grant = small.acquire(ANNA, "ab")
    small.finish(small.orders())
    assert small.announced(grant) == [True, True]


# --- drop -------------------------------------------------------------------------------------------------------------


def test_a_block_dropped_on_its_way_arrives_for_those_who_hold_it_and_then_goes():
    small = SmallSpill(restored="ab")
    grant = small.acquire(ANNA, "ab", request_id="r")
    moves = small.orders()
    assert small.store.drop(small.namespace, small.keys("a")) == 2
    small.store.check()

    assert small.match("ab") == 0
    assert small.reserve(BERT, "ab").declined_reason == "leaving"
    assert small.acquire(ANNA, "ab", request_id="r").ready == b"\0\0", "its bytes are still to come"
    assert small.orders() == []
    assert small.forgets == [], "it is being read"
    small.finish(moves)
    assert small.announced(grant) == [True, True]
    assert small.acquire(ANNA, "ab", request_id="r").ready == b"\1\1"
    small.orders()
    assert sorted(small.names(small.forgets)) == ["a", "b"]
    assert small.tier().leaving_bytes == 2 * PAGE
    small.store.release(ANNA, grant.lease_id, 0.0)
    small.commit_index()
    for tier in (small.tier(), small.nvme()):
        assert tier.free_bytes == tier.capacity_bytes


@pytest.mark.parametrize("problem", [None, *MoveProblem])
def test_a_block_dropped_on_its_way_to_nobody_leaves_nothing(problem: MoveProblem | None):
    small = SmallSpill(restored="a")
    small.store.prefetch(small.namespace, small.keys("a"), 0, 0.0)
    moves = small.orders()
    small.store.drop(small.namespace, small.keys("a"))
    small.finish(moves, problem)
    small.orders()
    assert [forget.problem for forget in small.forgets] == [problem if problem in BAD_SLOT else None]
    small.commit_index()
    assert small.tier().free_bytes == small.tier().capacity_bytes
    nvme = small.nvme()
    assert nvme.quarantined_bytes == PAGE * (problem in BAD_SLOT)
    assert nvme.free_bytes + nvme.quarantined_bytes == nvme.capacity_bytes


def test_a_block_dropped_on_its_way_that_does_not_come_ends_its_leases():
    small = SmallSpill(restored="a")
    grant = small.acquire(ANNA, "a")
    moves = small.orders()
    small.store.drop(small.namespace, None)
    small.finish(moves, MoveProblem.CHECKSUM)
    removed = [event.reason for event in small.events if isinstance(event, BlockRemoved)]
    assert removed == [RemovalReason.DROPPED], "once"
    with pytest.raises(UnknownLease):
        small.store.release(ANNA, grant.lease_id, 0.0)
    assert small.tier().free_bytes == small.tier().capacity_bytes


# --- reads that nobody waits for any more, and prefetches that somebody waits for now --------------------------------------


def ordered(small: SmallSpill):
    orders = small.store.take_orders(0.0)
    small.store.check()
    return orders


def test_the_end_of_the_last_lease_cancels_what_has_not_been_read():
    small = SmallSpill(restored="abc")
    first, second = small.acquire(ANNA, "abc"), small.acquire(BERT, "ab")
    a, b, c = small.orders()
    small.store.release(ANNA, first.lease_id, 0.0)
    assert ordered(small).cancels == (c.record.offset,)

    small.finish([a])
    small.store.release(BERT, second.lease_id, 0.0)
    assert ordered(small).cancels == (b.record.offset,)

    small.finish([b, c], MoveProblem.CANCELLED)
    assert small.counter("cancelled_reads_total") == 2
    assert small.tiers_of("abc") == [0, 1, 1]  # nothing is wrong with them
    assert small.tier().free_bytes == small.tier().capacity_bytes - PAGE


def test_an_expired_lease_waits_no_more_and_keeps_its_slots_until_they_are_settled():
    small = SmallSpill(restored="a")
    small.acquire(ANNA, "a", ttl_s=1.0)
    (move,) = small.orders()
    small.store.expire(1.0)
    assert ordered(small).cancels == (move.record.offset,)
    small.finish([move], MoveProblem.CANCELLED, 1.0)
    assert small.tier().free_bytes == small.tier().capacity_bytes


def test_a_read_that_began_before_it_was_cancelled_is_kept():
    small = SmallSpill(restored="a")
    grant = small.acquire(ANNA, "a")
    (move,) = small.orders()
    small.store.release(ANNA, grant.lease_id, 0.0)
    small.finish([move])
    assert small.tiers_of("a") == [0]
    assert small.counter("cancelled_reads_total") == 0


def test_who_asks_between_a_cancellation_and_its_end_gets_the_block_all_the_same():
    small = SmallSpill(restored="a")
    grant = small.acquire(ANNA, "a")
    (move,) = small.orders()
    small.store.release(ANNA, grant.lease_id, 0.0)
    assert ordered(small).cancels == (move.record.offset,)
    later = small.acquire(BERT, "a")
    assert small.orders() == []

    small.finish([move], MoveProblem.CANCELLED)
    (again,) = small.orders()
    assert (again.record.offset, again.arena_offset) == (move.record.offset, move.arena_offset)
    assert small.announced(later) == [False]
    small.finish([again])
    assert small.announced(later) == [True]


def test_a_prefetch_is_not_cancelled_but_one_that_was_joined_is():
    small = SmallSpill(restored="ab")
    small.store.prefetch(small.namespace, small.keys("ab"), 0, 0.0)
    a, _ = small.orders()
    grant = small.acquire(ANNA, "a")
    assert ordered(small).hastens == (a.record.offset,)
    small.store.release(ANNA, grant.lease_id, 0.0)
    assert ordered(small).cancels == (a.record.offset,)


def test_joining_again_hastens_nothing_twice():
    small = SmallSpill(restored="a")
    small.store.prefetch(small.namespace, small.keys("a"), 0, 0.0)
    small.orders()
    small.acquire(ANNA, "a")
    small.acquire(BERT, "a")
    assert len(ordered(small).hastens) == 1


def test_from_the_back_the_last_ones_come_first():
    blocks = [f"n{i}" for i in range(20)]
    small = SmallSpill(restored=blocks, drives=(4,))
    small.acquire(ANNA, blocks, first_needed=1, from_back=True)
    names = [int(name[1:]) for name in small.names(small.orders())]
    assert names == list(range(19, 0, -1))
