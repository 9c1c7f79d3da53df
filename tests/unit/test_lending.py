"""The owner's side of loans: what is lent, to whom, until when."""

import threading
import time

import numpy as np
import pytest
from small_store import SmallStore
from xxhash import xxh3_64_intdigest

from kvstore.core.blocks import Extent, Holder
from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.errors import UnknownLease
from kvstore.core.plans import ReadGrant
from kvstore.lending import MAX_WAITING_LOANS, Lender
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.lease_gate import LeaseGate

PAGE = 4096
ANNA, NODE, LATER = Holder(b"anna" * 4, 1), Holder(b"node" * 4, 2), Holder(b"node" * 4, 3)


class Owner:
    """A small store with memory, whose blocks hold random bytes, and a lender."""

    def __init__(self) -> None:
        self.small = SmallStore()
        self.memory = np.random.default_rng(5).integers(0, 256, len(self.small.generations) * PAGE, np.uint8)
        self.clock = ManualClock()
        self.gate = LeaseGate(self.clock)
        self.lender = Lender(self.memory, self.small.generations, self.gate, self.clock)
        self.released: list[int] = []

    def acquire(self, names: str, first_needed: int = 0, ttl_s: float = 5.0) -> ReadGrant:
        keys = self.small.keys(names)
        now_s = self.clock.now_s()
        return self.small.store.acquire(NODE, "", self.small.namespace, keys, first_needed, ttl_s, now_s, borrow=False)

    def release(self, lease_id: int) -> None:
        self.small.store.release(NODE, lease_id, self.clock.now_s())
        self.released.append(lease_id)

    def lend(self, names: str, first_needed: int = 0) -> pb.LendReply:
        return self.lender.lend(lambda: self.acquire(names, first_needed), self.release, first_needed, 0.01)

    def num_leases(self) -> int:
        self.small.store.check()
        return self.small.store.stats().num_leases


def extents(reply: pb.LendReply) -> list[Extent]:
    columns = (np.frombuffer(column, "<u8").tolist() for column in (reply.offsets, reply.generations))
    return [Extent(offset, PAGE, generation) for offset, generation in zip(*columns, strict=True)]


def test_what_is_lent_can_be_read_by_who_shows_the_loan_until_it_is_given_back() -> None:
    owner = Owner()
    owner.small.put(ANNA, "abcd")
    reply = owner.lend("abcdx", first_needed=1)

    assert (reply.num_blocks, len(extents(reply))) == (4, 3)
    checksums = [xxh3_64_intdigest(owner.memory[each.offset : each.offset + PAGE]) for each in extents(reply)]
    assert np.frombuffer(reply.checksums, "<u8").tolist() == checksums
    assert 0 < reply.expires_in_s <= 5.0
    assert owner.gate.may_read(reply.loan, extents(reply)[:2])
    assert not owner.gate.may_read(bytes(16), extents(reply)[:1])
    other = extents(reply)[0]._replace(offset=extents(reply)[0].offset + PAGE * 8)
    assert not owner.gate.may_read(reply.loan, [other])

    owner.lender.end(reply.lease_id + 1)  # of somebody else
    assert owner.gate.may_read(reply.loan, extents(reply))
    owner.lender.end(reply.lease_id)
    owner.lender.end(reply.lease_id)
    assert not owner.gate.may_read(reply.loan, extents(reply)[:1])
    assert len(owner.gate) == 0


def test_two_loans_of_the_same_blocks_end_each_for_itself() -> None:
    owner = Owner()
    owner.small.put(ANNA, "ab")
    one, two = owner.lend("ab"), owner.lend("ab")
    assert one.loan != two.loan
    owner.lender.end(one.lease_id)
    assert not owner.gate.may_read(one.loan, extents(one))
    assert owner.gate.may_read(two.loan, extents(two))


def test_a_loan_and_its_lease_end_with_their_time_and_leave_nothing_in_limbo() -> None:
    owner = Owner()
    owner.small.put(ANNA, "ab")
    reply = owner.lend("ab")
    owner.clock.advance(4.9)
    assert owner.gate.may_read(reply.loan, extents(reply))
    owner.clock.advance(0.2)
    assert not owner.gate.may_read(reply.loan, extents(reply))
    assert owner.small.store.expire(owner.clock.now_s()) == 1
    assert owner.num_leases() == 0
    assert not owner.small.store.instance_in_limbo(NODE.instance)
    with pytest.raises(UnknownLease):
        owner.small.store.release(NODE, reply.lease_id, owner.clock.now_s())

    again = owner.lend("ab")
    assert not owner.gate.may_read(reply.loan, extents(again))
    assert len(owner.gate) == 1  # the old one is forgotten


def test_the_end_of_a_nodes_session_ends_what_it_borrowed_over_it() -> None:
    owner = Owner()
    owner.small.put(ANNA, "ab")
    owner.lend("ab")
    owner.small.store.end_session(LATER, 0.0)  # another session of the same node
    assert owner.num_leases() == 1
    owner.small.store.end_session(NODE, 0.0)
    assert owner.num_leases() == 0
    assert not owner.small.store.instance_in_limbo(NODE.instance)


def test_a_lent_block_is_not_evicted_and_a_dropped_one_goes_when_its_loan_ends() -> None:
    owner = Owner()
    owner.small.put(ANNA, "ab")
    reply = owner.lend("ab")
    owner.small.store.drop(owner.small.namespace, owner.small.keys("a"))
    assert owner.small.tier().leaving_bytes == 2 * PAGE
    assert owner.gate.may_read(reply.loan, extents(reply))
    owner.clock.advance(6.0)
    owner.small.store.expire(owner.clock.now_s())
    assert owner.small.tier().leaving_bytes == 0


def test_nothing_is_lent_of_what_nobody_has() -> None:
    owner = Owner()
    assert owner.lend("ab") == pb.LendReply()
    owner.small.put(ANNA, "ab")
    assert owner.lend("ab", first_needed=2) == pb.LendReply(num_blocks=2)
    assert owner.num_leases() == 0


def test_blocks_that_do_not_come_in_time_are_not_lent() -> None:
    owner = Owner()
    owner.small.put(ANNA, "abc")
    owner.clock = MonotonicClock()  # type: ignore[assignment]
    owner.lender = Lender(owner.memory, owner.small.generations, owner.gate, owner.clock)
    grant = owner.acquire("abc")
    table = owner.small.generations
    first, second, _ = (extent.offset // PAGE for extent in grant.extents)

    table[second] -= np.uint64(1)  # on its way
    reply = owner.lender.lend(lambda: grant, owner.release, 0, 0.02)
    assert (reply.num_blocks, len(extents(reply))) == (1, 1)
    owner.lender.end(reply.lease_id)

    table[first] -= np.uint64(1)
    assert owner.lender.lend(lambda: grant, owner.release, 0, 0.02) == pb.LendReply()
    assert owner.released == [grant.lease_id]


def test_so_many_calls_wait_for_drives_and_others_are_answered_at_once() -> None:
    owner = Owner()
    owner.small.put(ANNA, "abc")
    owner.lender = Lender(owner.memory, owner.small.generations, owner.gate, MonotonicClock())
    grant = owner.acquire("abc")
    place = grant.extents[1].offset // PAGE
    owner.small.generations[place] -= np.uint64(1)
    replies: list[pb.LendReply] = []

    def lend() -> None:
        replies.append(owner.lender.lend(lambda: grant, owner.release, 0, 5.0))

    threads = [threading.Thread(target=lend) for _ in range(MAX_WAITING_LOANS)]
    for thread in threads:
        thread.start()
    while owner.lender._places._value:
        time.sleep(0.001)
    started_s = time.monotonic()
    lend()
    assert time.monotonic() - started_s < 2.0
    assert [reply.num_blocks for reply in replies] == [1]
    owner.small.generations[place] += np.uint64(1)
    for thread in threads:
        thread.join()
    assert [reply.num_blocks for reply in replies] == [1] + [3] * MAX_WAITING_LOANS


def test_a_block_that_comes_while_the_lender_waits_is_lent() -> None:
    owner = Owner()
    owner.small.put(ANNA, "abc")
    owner.clock = MonotonicClock()  # type: ignore[assignment]
    owner.lender = Lender(owner.memory, owner.small.generations, owner.gate, owner.clock)
    grant = owner.acquire("abc")
    table = owner.small.generations
    place = grant.extents[1].offset // PAGE
    table[place] -= np.uint64(1)

    def arrive() -> None:
        time.sleep(0.03)
        table[place] += np.uint64(1)

    thread = threading.Thread(target=arrive)
    thread.start()
    reply = owner.lender.lend(lambda: grant, owner.release, 0, 5.0)
    thread.join()
    assert reply.num_blocks == 3


def test_a_slot_that_is_another_blocks_when_its_checksum_is_made_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    owner.small.put(ANNA, "abc")
    checksum = owner.lender._checksum

    def change_meanwhile(extent: Extent) -> int:
        if extent == grant.extents[1]:
            owner.small.generations[extent.offset // PAGE] += np.uint64(7)
        return checksum(extent)

    grant = owner.acquire("abc")
    monkeypatch.setattr(owner.lender, "_checksum", change_meanwhile)
    reply = owner.lender.lend(lambda: grant, owner.release, 0, 0.0)
    assert reply.num_blocks == 1
