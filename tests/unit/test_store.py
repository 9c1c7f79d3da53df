"""The store's verbs, one behaviour a test. Blocks are pages here: a key's slot is 4 KiB, a segment holds 16 of them."""

import pytest
from small_store import PAGE, SEGMENT, SmallStore, spec

from kvstore.core.blocks import Extent, Holder, KeyStatus
from kvstore.core.errors import LeaseExpired, LeaseRefused, Overloaded, ProtocolError, SpecMismatch, UnknownLease
from kvstore.core.events import BlockRemoved, BlockStored, RemovalReason
from kvstore.core.keys import HashScheme, KVSpec, differing_fields
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.counters import COUNTERS

GRANTED, HELD, DECLINED = KeyStatus.GRANTED, KeyStatus.HELD, KeyStatus.DECLINED
ANNA, BERT = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2)


# --- match and acquire ------------------------------------------------------------------------------------------------


def test_a_block_is_found_once_committed_and_not_before():
    small = SmallStore()
    grant = small.reserve(ANNA, "abc")
    assert small.match("abc") == 0

    assert small.store.commit(ANNA, grant.lease_id, None, 0.0) == 3

    assert small.match("abcd") == 3
    assert small.match("bc") == 2  # match trusts the caller that keys are those of one sequence
    assert small.match("xabc") == 0


def test_the_prefix_ends_at_the_first_block_that_is_not_ready():
    small = SmallStore()
    grant = small.reserve(ANNA, "abcd")
    small.store.commit(ANNA, grant.lease_id, small.keys("abd"), 0.0)
    assert small.match("abcd") == 2
    small.store.commit(ANNA, grant.lease_id, None, 0.0)
    assert small.match("abcd") == 4


def test_match_names_the_tier_of_each_block():
    small = SmallStore()
    small.put(ANNA, "abc")
    assert small.store.match(small.namespace, small.keys("abcd"), 0.0).tiers == b"\0\0\0"


def test_acquire_grants_the_extents_that_the_writer_was_given_from_first_needed_on():
    small = SmallStore()
    written = small.put(ANNA, "abcd")

    grant = small.acquire(BERT, "abcdx", first_needed=1)

    assert grant.num_blocks == 4
    assert grant.extents == written.extents[1:]
    assert all(extent.nbytes == small.spec.block_nbytes for extent in grant.extents)


@pytest.mark.parametrize(
    ("asked", "first_needed", "num_blocks"), [("xyz", 0, 0), ("abc", 3, 3), ("abc", 9, 3), ("", 0, 0)]
)
def test_nothing_to_lease_is_lease_0(asked: str, first_needed: int, num_blocks: int):
    small = SmallStore()
    small.put(ANNA, "abc")

    grant = small.acquire(BERT, asked, first_needed=first_needed)

    assert (grant.lease_id, grant.num_blocks, grant.extents) == (0, num_blocks, ())
    assert small.store.stats().num_leases == 0


# --- reserve ----------------------------------------------------------------------------------------------------------


def test_reserve_grants_what_nobody_has_and_nobody_is_writing():
    small = SmallStore()
    small.put(ANNA, "ab")
    small.reserve(ANNA, "abc")

    grant = small.reserve(BERT, "abcde")

    assert grant.statuses == (HELD, HELD, HELD, GRANTED, GRANTED)
    assert len(grant.extents) == 2
    assert grant.declined_reason == ""


def test_reserve_of_held_blocks_alone_is_lease_0():
    small = SmallStore()
    small.put(ANNA, "ab")
    grant = small.reserve(BERT, "ab")
    assert (grant.lease_id, grant.statuses, grant.extents) == (0, (HELD, HELD), ())


def test_an_orphan_and_all_after_it_are_declined():
    small = SmallStore()
    grant = small.reserve(ANNA, "bcd", parent="a")
    assert (grant.lease_id, grant.statuses, grant.declined_reason) == (0, (DECLINED,) * 3, "orphan")
    assert small.counter("declined_blocks_orphan_total") == 3


def test_a_parent_being_written_is_parent_enough():
    small = SmallStore()
    small.reserve(ANNA, "a")
    assert small.reserve(BERT, "bc", parent="a").statuses == (GRANTED, GRANTED)


def test_a_held_block_needs_no_held_parent():
    small = SmallStore()
    small.put(ANNA, "ab")
    assert small.reserve(BERT, "bc", parent="u").statuses == (HELD, GRANTED)


def test_without_room_the_longest_run_is_granted():
    small = SmallStore(num_segments=1)
    grant = small.reserve(ANNA, [f"k{i}" for i in range(20)])
    assert grant.statuses == (GRANTED,) * 16 + (DECLINED,) * 4
    assert grant.declined_reason == "no_space"
    assert small.counter("declined_blocks_no_space_total") == 4


def test_held_blocks_behind_the_first_declined_one_are_declined_too():
    small = SmallStore(num_segments=1)
    small.put(ANNA, "ab")
    small.acquire(ANNA, "ab")
    small.put(ANNA, [f"k{i}" for i in range(14)])
    small.acquire(ANNA, [f"k{i}" for i in range(14)])

    grant = small.reserve(BERT, ["a", "new", "b"])

    assert grant.statuses == (HELD, DECLINED, DECLINED)


def test_no_segment_ready_yet_is_no_space_and_no_error():
    small = SmallStore(ready_segments=0)
    assert small.reserve(ANNA, "a").declined_reason == "no_space"
    small.slots.add_segments(1)
    assert small.reserve(ANNA, "a").statuses == (GRANTED,)


@pytest.mark.parametrize("keys", ["", "aba"])
def test_reserve_refuses_no_keys_and_the_same_key_twice(keys: str):
    small = SmallStore()
    with pytest.raises(ProtocolError) as caught:
        small.reserve(ANNA, keys)
    assert caught.value.fields["field"] == "keys"


def test_acquire_refuses_the_same_key_twice():
    small = SmallStore()
    small.put(ANNA, "ab")
    with pytest.raises(ProtocolError):
        small.acquire(ANNA, "aba")
    assert small.store.stats().num_leases == 0


def test_too_many_keys_are_refused_by_name():
    small = SmallStore()
    keys = [b"%016d" % i for i in range(MAX_KEYS_PER_CALL + 1)]
    for call in (
        lambda: small.store.match(small.namespace, keys, 0.0),
        lambda: small.store.acquire(ANNA, "r", small.namespace, keys, 0, 1.0, 0.0),
        lambda: small.store.reserve(ANNA, "r", small.namespace, b"", keys, 1.0, 0.0),
    ):
        with pytest.raises(Overloaded) as caught:
            call()
        assert caught.value.fields == {"limit": "MAX_KEYS_PER_CALL", "value": MAX_KEYS_PER_CALL + 1}


# --- commit and abort -------------------------------------------------------------------------------------------------


def test_commit_twice_counts_a_block_once():
    small = SmallStore()
    grant = small.reserve(ANNA, "ab")
    assert small.store.commit(ANNA, grant.lease_id, small.keys("a"), 0.0) == 1
    assert small.store.commit(ANNA, grant.lease_id, small.keys("a"), 0.0) == 0
    assert small.store.commit(ANNA, grant.lease_id, small.keys("ab"), 0.0) == 1
    with pytest.raises(UnknownLease):
        small.store.commit(ANNA, grant.lease_id, None, 0.0)


def test_commit_of_a_block_that_was_evicted_since_its_first_commit_counts_nothing():
    small = SmallStore(num_segments=1)
    grant = small.reserve(ANNA, ["a", "z"])
    small.store.commit(ANNA, grant.lease_id, small.keys("z"), 0.0)
    small.put(BERT, [f"k{i}" for i in range(15)])
    assert small.match("z") == 0

    assert small.store.commit(ANNA, grant.lease_id, small.keys("z"), 0.0) == 0
    assert small.match(["k0"]) == 1


def test_commit_of_a_key_that_is_not_the_leases_is_refused_and_publishes_nothing():
    small = SmallStore()
    grant = small.reserve(ANNA, "ab")
    with pytest.raises(ProtocolError) as caught:
        small.store.commit(ANNA, grant.lease_id, small.keys("abx"), 0.0)
    assert caught.value.fields["field"] == "keys"
    assert small.match("ab") == 0


def test_a_read_lease_cannot_be_committed():
    small = SmallStore()
    small.put(ANNA, "a")
    grant = small.acquire(ANNA, "a")
    with pytest.raises(ProtocolError) as caught:
        small.store.commit(ANNA, grant.lease_id, None, 0.0)
    assert caught.value.fields == {"field": "lease_id", "value": grant.lease_id}


def test_abort_publishes_nothing_and_frees_what_was_not_committed():
    small = SmallStore()
    grant = small.reserve(ANNA, "abc")
    small.store.commit(ANNA, grant.lease_id, small.keys("a"), 0.0)
    small.store.abort(ANNA, grant.lease_id, 0.0)
    assert small.match("abc") == 1
    assert small.tier().writing_bytes == 0
    assert small.reserve(BERT, "abc").statuses == (HELD, GRANTED, GRANTED)


def test_another_instance_does_not_know_the_lease_another_session_of_the_same_does():
    small = SmallStore()
    grant = small.reserve(ANNA, "a")
    for verb in (
        lambda h: small.store.commit(h, grant.lease_id, None, 0.0),
        lambda h: small.store.abort(h, grant.lease_id, 0.0),
    ):
        with pytest.raises(UnknownLease) as caught:
            verb(BERT)
        assert caught.value.fields == {"lease_id": grant.lease_id}
    assert small.store.renew(BERT, [grant.lease_id], 10.0, 0.0) == [grant.lease_id]
    assert small.store.commit(Holder(ANNA.instance, 99), grant.lease_id, None, 0.0) == 1


# --- expiry and limbo -------------------------------------------------------------------------------------------------


def test_an_expired_writer_cannot_commit_and_its_slot_is_nobodys_until_it_confirms():
    small = SmallStore(num_segments=1)
    late = small.reserve(ANNA, "a", ttl_s=5.0)

    with pytest.raises(LeaseExpired):
        small.store.commit(ANNA, late.lease_id, None, 5.0)
    assert small.tier().limbo_bytes == PAGE
    again = small.reserve(BERT, "a", now_s=5.0)
    assert again.extents[0].offset != late.extents[0].offset

    with pytest.raises(LeaseExpired):
        small.store.abort(ANNA, late.lease_id, 6.0)
    assert small.tier().limbo_bytes == 0
    with pytest.raises(UnknownLease):
        small.store.abort(ANNA, late.lease_id, 6.0)


def test_an_expired_readers_block_stays_served_and_is_not_evicted_until_it_confirms():
    small = SmallStore(num_segments=1)
    small.put(ANNA, "a")
    late = small.acquire(BERT, "a", ttl_s=5.0)
    assert small.store.expire(5.0) == 1
    assert small.store.instance_in_limbo(BERT.instance)

    assert small.put(ANNA, [f"k{i}" for i in range(20)], now_s=6.0).statuses.count(GRANTED) == 15
    assert small.match("a") == 1
    assert small.acquire(ANNA, "a", now_s=6.0).num_blocks == 1
    small.store.end_instance(ANNA.instance, 6.0)

    with pytest.raises(LeaseExpired):
        small.store.release(BERT, late.lease_id, 6.0)
    assert not small.store.instance_in_limbo(BERT.instance)
    assert small.put(ANNA, ["new"], now_s=6.0).statuses == (GRANTED,)


def test_renew_moves_the_expiry_and_names_what_it_cannot_renew():
    small = SmallStore()
    short, long = small.reserve(ANNA, "a", ttl_s=5.0), small.reserve(ANNA, "b", ttl_s=50.0)
    assert small.store.next_expiry_s() == 5.0
    assert small.store.renew(ANNA, [short.lease_id, 999], 10.0, 4.0) == [999]
    assert small.store.next_expiry_s() == 14.0
    assert small.store.renew(ANNA, [long.lease_id], 1.0, 4.0) == []
    assert small.store.expire(14.0) == 1
    assert small.store.renew(ANNA, [short.lease_id], 10.0, 14.0) == [short.lease_id]
    assert small.store.next_expiry_s() == 50.0


def test_a_lease_is_cut_to_the_longest_time_and_none_means_the_default():
    small = SmallStore()
    assert small.reserve(ANNA, "a", ttl_s=1e9).expires_s == 300.0
    assert small.reserve(ANNA, "b", ttl_s=0.0).expires_s == 30.0
    assert small.reserve(ANNA, "c", ttl_s=float("nan")).expires_s == 30.0


def test_the_end_of_a_connection_expires_its_own_leases_only():
    small = SmallStore()
    other_session = Holder(ANNA.instance, 7)
    mine, theirs = small.reserve(ANNA, "a"), small.reserve(other_session, "b")

    small.store.end_session(ANNA, 1.0)

    assert small.store.commit(other_session, theirs.lease_id, None, 1.0) == 1
    with pytest.raises(LeaseExpired):
        small.store.commit(other_session, mine.lease_id, None, 1.0)
    assert small.tier().limbo_bytes == PAGE


def test_the_end_of_an_instance_frees_everything_it_held():
    small = SmallStore()
    small.put(BERT, "xy")
    small.reserve(ANNA, "ab")
    small.acquire(ANNA, "xy")
    small.reserve(ANNA, "cd", ttl_s=1.0)
    small.store.expire(2.0)

    small.store.end_instance(ANNA.instance, 2.0)

    assert small.store.stats().num_leases == small.store.stats().num_expired_leases == 0
    assert (small.tier().limbo_bytes, small.tier().writing_bytes) == (0, 0)
    assert small.match("xy") == 2


def test_too_much_in_limbo_refuses_new_leases_until_confirmed():
    small = SmallStore(num_segments=1, limbo_fraction=0.25)
    small.put(BERT, "xy")
    at_the_limit = small.reserve(BERT, "pqrs", ttl_s=1.0)
    late = small.reserve(ANNA, "abcde", ttl_s=1.0)
    small.store.expire(1.0)
    assert at_the_limit.lease_id

    for call in (lambda: small.reserve(ANNA, "f", now_s=2.0), lambda: small.acquire(ANNA, "xy", now_s=2.0)):
        with pytest.raises(LeaseRefused) as caught:
            call()
        assert caught.value.fields == {"limit": "MAX_LIMBO_FRACTION", "value": 5 * PAGE}
    assert small.counter("refused_leases_total") == 2
    assert small.reserve(BERT, "f", now_s=2.0).statuses == (GRANTED,)

    with pytest.raises(LeaseExpired):
        small.store.abort(ANNA, late.lease_id, 2.0)
    assert small.acquire(ANNA, "xy", now_s=2.0).num_blocks == 2


def test_too_many_leases_are_refused_by_name():
    small = SmallStore(max_leases_per_instance=2)
    small.reserve(ANNA, "a")
    small.reserve(ANNA, "b")
    with pytest.raises(LeaseRefused) as caught:
        small.reserve(ANNA, "c")
    assert caught.value.fields == {"limit": "MAX_LEASES_PER_INSTANCE", "value": 2}
    assert small.reserve(BERT, "c").lease_id


# --- idempotence ------------------------------------------------------------------------------------------------------


def test_the_same_request_again_is_answered_with_the_same_lease_renewed():
    small = SmallStore()
    first = small.reserve(ANNA, "ab", request_id="put-1", ttl_s=10.0)
    again = small.reserve(ANNA, "ab", request_id="put-1", ttl_s=10.0, now_s=4.0)
    assert again == first._replace(expires_s=14.0)

    small.store.commit(ANNA, first.lease_id, None, 4.0)
    read = small.acquire(ANNA, "abx", request_id="put-1", first_needed=1, ttl_s=10.0, now_s=4.0)
    assert small.acquire(ANNA, "abx", request_id="put-1", first_needed=1, ttl_s=10.0, now_s=5.0) == read._replace(
        expires_s=15.0
    )
    assert small.store.stats().num_leases == 1


def test_a_request_id_used_for_something_else_is_refused():
    small = SmallStore()
    small.put(ANNA, "abc")
    small.acquire(ANNA, "abc", request_id="r")
    small.reserve(ANNA, "xy", request_id="r")
    for call in (
        lambda: small.acquire(ANNA, "ab", request_id="r"),
        lambda: small.acquire(ANNA, "abc", request_id="r", first_needed=1),
        lambda: small.reserve(ANNA, "y", request_id="r", parent="x"),
    ):
        with pytest.raises(ProtocolError) as caught:
            call()
        assert caught.value.fields == {"field": "request_id", "value": "r"}
    assert small.acquire(BERT, "ab", request_id="r").num_blocks == 2


def test_a_request_id_may_be_used_again_after_its_lease_ended():
    small = SmallStore()
    first = small.reserve(ANNA, "ab", request_id="r", ttl_s=1.0)
    second = small.reserve(ANNA, "ab", request_id="r", now_s=1.0)
    assert second.lease_id != first.lease_id
    small.store.abort(ANNA, second.lease_id, 1.0)
    assert small.reserve(ANNA, "abc", request_id="r", now_s=1.0).statuses == (GRANTED,) * 3


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_the_tail_of_the_coldest_sequence_goes_first():
    small = SmallStore(num_segments=1)
    small.put(ANNA, [f"a{i}" for i in range(8)])
    small.put(ANNA, [f"b{i}" for i in range(8)])
    small.match([f"a{i}" for i in range(8)])

    small.put(ANNA, "xyz")

    assert small.match([f"b{i}" for i in range(8)]) == 5
    assert small.match([f"a{i}" for i in range(8)]) == 8


def test_storing_a_child_is_a_use_of_its_parent():
    small = SmallStore(num_segments=1)
    small.put(ANNA, "a")
    small.put(ANNA, [f"k{i}" for i in range(14)])
    small.put(ANNA, "b", parent="a")
    small.store.drop(small.namespace, small.keys("b"))

    small.put(ANNA, "xyz")

    assert small.match("a") == 1
    assert small.match([f"k{i}" for i in range(14)]) == 12


def test_a_reserve_never_evicts_its_own_prefix():
    small = SmallStore(num_segments=1)
    names = [f"k{i}" for i in range(16)]
    small.put(ANNA, names)

    grant = small.reserve(ANNA, ["new"], parent="k15")
    assert (grant.statuses, grant.declined_reason) == ((DECLINED,), "no_space")
    grant = small.reserve(ANNA, [*names[:15], "other"])
    assert grant.statuses == (HELD,) * 15 + (GRANTED,)

    assert small.match(names) == 15


def test_leased_blocks_are_not_evicted_and_a_full_arena_blocks_nobody():
    small = SmallStore(num_segments=1)
    names = [f"k{i}" for i in range(16)]
    small.put(ANNA, names)
    lease = small.acquire(BERT, names)

    assert small.reserve(ANNA, "x").declined_reason == "no_space"
    assert small.match(names) == 16

    small.store.release(BERT, lease.lease_id, 0.0)
    assert small.reserve(ANNA, "x").statuses == (GRANTED,)


def test_a_lease_on_the_tail_alone_keeps_the_head():
    small = SmallStore(num_segments=1)
    names = [f"k{i}" for i in range(16)]
    small.put(ANNA, names)
    small.acquire(BERT, names, first_needed=15)
    assert small.reserve(ANNA, "x").declined_reason == "no_space"


def test_a_burst_of_more_than_the_arena_loses_only_what_must_go():
    """1.6 times the arena in sequences of 8 blocks: all are stored, the last arena-full of them is all there."""
    small = SmallStore(num_segments=4)
    sequences = [[f"s{s}-{i}" for i in range(8)] for s in range(13)]
    for names in sequences:
        assert small.put(ANNA, names).statuses == (GRANTED,) * 8

    assert [small.match(names) for names in sequences] == [0] * 5 + [8] * 8
    assert small.counter("evicted_blocks_total") == 5 * 8


def test_a_new_model_gets_room_in_a_full_arena():
    """The old model's blocks are all colder; each new block takes a whole segment, so the old must empty segments."""
    small = SmallStore(num_segments=4)
    for s in range(8):
        small.put(ANNA, [f"s{s}-{i}" for i in range(8)])
    big = small.open(spec(pages=16))

    for i in range(4):
        assert small.put(ANNA, [f"big{i}"], namespace=big).statuses == (GRANTED,)

    assert [small.match([f"big{i}"], namespace=big) for i in range(4)] == [1, 1, 1, 1]
    assert small.put(ANNA, "ab").statuses == (GRANTED, GRANTED)
    assert small.match(["big0"], namespace=big) == 0
    assert small.match(["big1"], namespace=big) == 1


# --- ghosts and drop --------------------------------------------------------------------------------------------------


def test_a_child_is_found_again_when_its_aborted_parent_comes_back():
    small = SmallStore()
    parent = small.reserve(ANNA, "a")
    small.put(BERT, "bc", parent="a")
    small.store.abort(ANNA, parent.lease_id, 0.0)
    assert small.match("abc") == 0
    assert small.match("bc") == 2

    assert small.put(ANNA, "abc").statuses == (GRANTED, HELD, HELD)

    assert small.match("abc") == 3


def test_a_ghost_goes_with_its_last_child():
    small = SmallStore(num_segments=1)
    parent = small.reserve(ANNA, "a")
    small.put(BERT, "b", parent="a")
    small.store.abort(ANNA, parent.lease_id, 0.0)
    small.put(BERT, [f"k{i}" for i in range(16)])
    assert small.store._index.num_blocks == 16
    assert small.counter("evicted_blocks_total") == 1


def test_room_made_by_evicting_the_child_of_a_ghost_that_is_being_stored():
    """Evicting the child forgets the ghost's row while the very reserve that stores the ghost's block is under way."""
    small = SmallStore(num_segments=1)
    parent = small.reserve(ANNA, "a")
    small.put(BERT, "b", parent="a")
    small.store.abort(ANNA, parent.lease_id, 0.0)
    small.put(BERT, [f"k{i}" for i in range(15)])
    assert small.put(ANNA, "a").statuses == (GRANTED,)
    assert small.match("a") == 1


def test_dropping_the_only_child_of_a_ghost_forgets_the_ghosts_above_it():
    small = SmallStore()
    parents = small.reserve(ANNA, "ab")
    small.put(BERT, "c", parent="b")
    small.store.abort(ANNA, parents.lease_id, 0.0)
    assert small.store._index.num_blocks == 3
    assert small.store.drop(small.namespace, small.keys("c")) == 1
    assert small.store._index.num_blocks == 0
    small.store.check()


def test_a_block_above_a_ghost_is_a_leaf_once_what_hung_below_the_ghost_is_dropped():
    small = SmallStore(num_segments=1)
    small.put(ANNA, "a")
    middle = small.reserve(ANNA, "b", parent="a")
    small.put(BERT, "c", parent="b")
    small.store.abort(ANNA, middle.lease_id, 0.0)
    small.put(ANNA, [f"k{i}" for i in range(14)])
    lease = small.acquire(ANNA, [f"k{i}" for i in range(14)])

    small.store.drop(small.namespace, small.keys("c"))

    assert small.reserve(BERT, "xy").statuses == (GRANTED, GRANTED)  # one free slot, and that of "a"
    small.store.release(ANNA, lease.lease_id, 0.0)


def test_drop_takes_what_is_built_on_the_block_too():
    small = SmallStore()
    small.put(ANNA, "abcd")
    small.put(ANNA, "xy", parent="b")
    assert small.store.drop(small.namespace, small.keys("b?")) == 5
    assert small.match("abcd") == 1
    assert small.match("xy") == 0
    assert small.tier().ready_blocks == 1


def test_a_dropped_block_in_use_is_not_found_and_goes_with_its_last_reader():
    small = SmallStore()
    small.put(ANNA, "ab")
    first, second = small.acquire(ANNA, "ab"), small.acquire(BERT, "ab", first_needed=1)

    assert small.store.drop(small.namespace, small.keys("b")) == 1

    assert small.match("ab") == 1
    assert small.acquire(BERT, "ab").num_blocks == 1
    grant = small.reserve(ANNA, "abc")
    assert (grant.statuses, grant.declined_reason) == ((HELD, DECLINED, DECLINED), "leaving")
    small.store.release(ANNA, first.lease_id, 0.0)
    assert small.tier().leaving_bytes == PAGE
    small.store.release(BERT, second.lease_id, 0.0)
    assert small.tier().leaving_bytes == 0
    assert small.reserve(ANNA, "abc").statuses == (HELD, GRANTED, GRANTED)


def test_a_block_dropped_while_it_is_written_is_not_published():
    small = SmallStore()
    grant = small.reserve(ANNA, "ab")
    assert small.store.drop(small.namespace, small.keys("b")) == 1
    assert small.store.commit(ANNA, grant.lease_id, None, 0.0) == 1
    assert small.match("ab") == 1
    assert small.tier().leaving_bytes == 0


def test_a_dropped_block_whose_writer_expires_waits_in_limbo():
    small = SmallStore()
    small.reserve(ANNA, "ab", ttl_s=1.0)
    small.store.drop(small.namespace, None)
    small.store.expire(1.0)
    assert (small.tier().leaving_bytes, small.tier().limbo_bytes) == (0, 2 * PAGE)
    assert small.reserve(BERT, "ab", now_s=1.0).statuses == (GRANTED, GRANTED)


def test_dropping_a_namespace_leaves_the_others():
    small = SmallStore()
    other = small.open(spec(pages=2))
    small.put(ANNA, "abc")
    small.put(ANNA, "abc", namespace=other)
    lease = small.acquire(ANNA, "abc", first_needed=1)

    assert small.store.drop(small.namespace, None) == 3
    assert small.match("abc") == 0
    assert small.match("abc", namespace=other) == 3
    assert small.tier().leaving_bytes == 2 * PAGE
    small.store.release(ANNA, lease.lease_id, 0.0)
    assert small.store._index.num_blocks == 3


def test_dropping_what_is_not_there_is_nothing():
    small = SmallStore()
    assert small.store.drop(small.namespace, small.keys("ab")) == 0
    assert small.store.drop(small.namespace, None) == 0


# --- namespaces, events, stats ----------------------------------------------------------------------------------------


def test_namespaces_never_meet_and_near_misses_name_the_field():
    small = SmallStore()
    small.put(ANNA, "abc")
    seeded = small.store.open_namespace(spec(hash=HashScheme(seed="other")), "")
    assert seeded.num_blocks == 0
    assert [(m.namespace, m.differing_fields, m.num_blocks) for m in seeded.near_misses] == [
        (small.namespace, ("hash.seed",), 3)
    ]
    assert small.match("abc", namespace=seeded.namespace) == 0
    assert small.store.open_namespace(small.spec, "").num_blocks == 3
    assert small.store.open_namespace(small.spec, "somebody else").near_misses == ()


def test_same_shape_is_a_near_miss_other_model_and_other_layer_group_are_not():
    small = SmallStore()
    assert [m.differing_fields for m in small.store.open_namespace(spec(weights="finetuned"), "").near_misses] == [
        ("weights",)
    ]
    assert small.store.open_namespace(spec(weights="other", num_layers=7, num_kv_heads=3), "").near_misses == ()
    assert small.store.open_namespace(spec(group="window:128"), "").near_misses == ()


def test_an_unknown_namespace_and_a_block_larger_than_a_segment_are_refused():
    small = SmallStore()
    with pytest.raises(SpecMismatch) as caught:
        small.match("a", namespace=b"n" * 16)
    assert caught.value.fields == {"field": "namespace", "value": (b"n" * 16).hex()}
    with pytest.raises(SpecMismatch) as caught:
        small.store.open_namespace(spec(pages=17), "")
    assert caught.value.fields == {"field": "block_nbytes", "value": 17 * PAGE}
    assert small.store.digest_nbytes(small.namespace) == 16


def test_too_many_namespaces_are_refused_and_the_known_ones_still_open(monkeypatch: pytest.MonkeyPatch):
    small = SmallStore()
    monkeypatch.setattr("kvstore.store.MAX_NAMESPACES", 1)
    with pytest.raises(Overloaded) as caught:
        small.store.open_namespace(spec(weights="second"), "")
    assert caught.value.fields == {"limit": "MAX_NAMESPACES", "value": 1}
    assert small.store.open_namespace(small.spec, "").namespace == small.namespace


def test_at_the_limit_namespaces_without_blocks_and_sessions_make_room(monkeypatch: pytest.MonkeyPatch):
    small = SmallStore()
    monkeypatch.setattr("kvstore.store.MAX_NAMESPACES", 4)
    small.put(ANNA, "abc")
    in_session, unused, leased = (small.open(spec(weights=name)) for name in ("in session", "unused", "leased"))
    small.reserve(ANNA, "w", namespace=leased)

    opened = small.store.open_namespace(spec(weights="fifth"), "", lambda: {in_session})

    small.store.check()
    assert small.store.stats().num_namespaces == 4
    with pytest.raises(SpecMismatch):
        small.match("a", namespace=unused)
    assert unused not in {miss.namespace for miss in opened.near_misses}
    assert small.match("abc") == 3
    assert small.match("w", namespace=in_session) == small.match("w", namespace=leased) == 0
    small.put(BERT, "xy", namespace=opened.namespace)  # under the number of the one that was closed
    assert small.match("xy", namespace=opened.namespace) == 2
    with pytest.raises(Overloaded):
        small.store.open_namespace(spec(weights="sixth"), "", lambda: {in_session})

    small.store.drop(opened.namespace, None)
    again = small.store.open_namespace(spec(weights="unused"), "", lambda: {in_session})
    assert (again.namespace, again.num_blocks) == (unused, 0)
    small.store.check()


def test_a_closed_namespaces_number_serves_one_of_another_block_size(monkeypatch: pytest.MonkeyPatch):
    small = SmallStore(num_segments=2)
    monkeypatch.setattr("kvstore.store.MAX_NAMESPACES", 1)
    small.put(ANNA, "abc")
    small.store.drop(small.namespace, None)

    large = small.store.open_namespace(spec(pages=2), "", set).namespace

    small.put(ANNA, "de", namespace=large)
    assert small.tier().ready_bytes == 4 * PAGE
    with pytest.raises(SpecMismatch):
        small.match("a")


def test_few_of_many_alike_namespaces_are_compared_those_with_most_blocks_first(monkeypatch: pytest.MonkeyPatch):
    small = SmallStore()
    compared = []

    def counting(left: KVSpec, right: KVSpec) -> list[str]:
        compared.append(right)
        return differing_fields(left, right)

    monkeypatch.setattr("kvstore.store.differing_fields", counting)
    for i in range(300):
        last = small.store.open_namespace(spec(hash=HashScheme(seed=str(i))), "").namespace
    small.put(ANNA, "ab", namespace=last)
    for i in range(300):
        small.store.open_namespace(spec(weights=str(i), num_layers=2), "another tenant")
    compared.clear()

    misses = small.store.open_namespace(spec(hash=HashScheme(seed="mine")), "").near_misses

    assert len(compared) == 64
    assert len(misses) == 8
    assert misses[0][:] == (last, ("hash.seed",), 2)
    assert {miss.num_blocks for miss in misses[1:]} == {0}
    compared.clear()
    small.store.open_namespace(spec(weights="0", num_layers=3), "another tenant")
    assert [other.num_layers for other in compared] == [2], "only the one with the same weights"


def test_events_tell_each_block_that_appears_and_disappears():
    small = SmallStore(num_segments=1)
    size = small.spec.block_nbytes
    small.put(ANNA, "ab")
    grant = small.reserve(ANNA, "cdef", parent="b")
    small.store.commit(ANNA, grant.lease_id, small.keys("cdf"), 0.0)
    small.put(ANNA, [f"k{i}" for i in range(12)])
    small.store.abort(ANNA, grant.lease_id, 0.0)
    small.store.drop(small.namespace, small.keys("ab"))

    a, b, c, d, e, f = small.keys("abcdef")
    stored = [event for event in small.events if isinstance(event, BlockStored)]
    removed = [event for event in small.events if isinstance(event, BlockRemoved)]
    assert stored[:3] == [
        BlockStored(small.namespace, "pinned", b"", (a, b), 2 * size),
        BlockStored(small.namespace, "pinned", b, (c, d), 2 * size),
        BlockStored(small.namespace, "pinned", e, (f,), size),
    ]
    assert removed[0] == BlockRemoved(small.namespace, "pinned", (f,), size, RemovalReason.EVICTED)
    assert set(removed[-1].hashes) == {a, b, c, d}
    assert removed[-1].reason is RemovalReason.DROPPED


def test_stats_account_for_every_byte_and_every_counter_has_a_sentence():
    small = SmallStore(num_segments=2)
    small.put(ANNA, "abc")
    small.reserve(ANNA, "de", ttl_s=1.0)
    small.store.expire(1.0)
    small.reserve(ANNA, "de", now_s=1.0)
    small.acquire(BERT, "abc", now_s=1.0)
    small.store.drop(small.namespace, small.keys("c"))

    tier = small.tier()

    assert (tier.ready_bytes, tier.writing_bytes, tier.leaving_bytes, tier.limbo_bytes) == (
        2 * PAGE,
        2 * PAGE,
        PAGE,
        2 * PAGE,
    )
    assert tier.capacity_bytes == 2 * SEGMENT
    counters = small.store.stats().counters
    assert counters.keys() == COUNTERS.keys()
    assert all(name.endswith("_total") and sentence.endswith(".") for name, sentence in COUNTERS.items())
    assert counters["expired_blocks_total"] == 2


def test_extents_carry_the_generation_that_the_table_shows():
    small = SmallStore()
    grant = small.put(ANNA, "ab")
    assert all(isinstance(extent, Extent) for extent in grant.extents)
    assert [small.generations[extent.offset // PAGE] for extent in grant.extents] == [
        e.generation for e in grant.extents
    ]
