"""Blocks from other nodes, as the store decides it; fetches are carried out by hand. A block is a page."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from small_spill import SmallSpill
from small_store import PAGE, SEGMENT

from kvstore import borrowing
from kvstore.core.blocks import Holder
from kvstore.core.errors import UnknownLease
from kvstore.core.events import BlockStored
from kvstore.core.limits import PEER_RETRY_S
from kvstore.core.loans import PEER_AT_FAULT, Fetch, FetchDone, LoanProblem
from kvstore.core.plans import ReadGrant

ANNA, BERT = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2)


class Node(NamedTuple):
    node_id: str


class Holding(NamedTuple):
    node: Node
    num_blocks: int


class FakeDirectory:
    """Says what it was told, farthest first."""

    def __init__(self) -> None:
        self.holders: dict[str, int] = {}

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> list[Holding]:
        found = [Holding(Node(name), min(count, len(hashes))) for name, count in self.holders.items() if count]
        return sorted(found, key=lambda each: -each.num_blocks)


class SmallPeers(SmallSpill):
    """A small store with other nodes that hold so many blocks of whatever prefix is asked about."""

    def __init__(self, holders: dict[str, int], **kwargs: Any) -> None:
        self.directory = FakeDirectory()
        self.directory.holders = holders
        super().__init__(directory=self.directory, **kwargs)
        self.cancels: list[int] = []

    def fetches(self) -> list[Fetch]:
        orders = self.store.take_fetches()
        self.store.check()
        self.cancels += orders.cancels
        return list(orders.fetches)

    def end(self, fetch: Fetch, blocks: Iterable[int], problem: LoanProblem | None = None, now_s: float = 0.0) -> None:
        self.store.finish_fetches([FetchDone(fetch.fetch_id, i, problem) for i in blocks], now_s)
        self.store.check()

    def fetched(self, fetch: Fetch) -> list[str]:
        return [key.rstrip(b".").decode() for key in fetch.keys[fetch.first :]]


def test_what_a_peer_has_behind_our_own_is_found_and_fetched_once_for_all():
    small = SmallPeers({"n1": 4})
    small.put(ANNA, "ab")
    assert small.tiers_of("abcdx") == [0, 0, 2, 2]
    assert small.fetches() == []

    grants = [small.acquire(holder, "abcdx") for holder in (ANNA, BERT)]
    (fetch,) = small.fetches()
    assert (fetch.node_id, fetch.first, small.fetched(fetch)) == ("n1", 2, ["c", "d"])
    assert list(fetch.arena_offsets) == [extent.offset for extent in grants[0].extents[2:]]
    assert [(grant.num_blocks, grant.ready) for grant in grants] == [(4, b"\1\1\0\0")] * 2

    small.end(fetch, [1])
    small.end(fetch, [0])
    assert [small.announced(grant) for grant in grants] == [[True] * 4] * 2
    for holder, grant in zip((ANNA, BERT), grants, strict=True):
        small.store.release(holder, grant.lease_id, 0.0)
    assert small.tiers_of("abcd") == [0, 0, 0, 0]
    assert small.counter("fetched_blocks_total") == 2


def test_blocks_that_the_engine_has_are_not_fetched_and_their_followers_are_found_behind_them():
    small = SmallPeers({"n1": 4})
    grant = small.acquire(ANNA, "abcd", first_needed=2)
    (fetch,) = small.fetches()
    assert (grant.num_blocks, len(grant.extents), small.fetched(fetch)) == (4, 2, ["c", "d"])
    small.end(fetch, [0, 1])
    assert small.tiers_of("abcd") == [2, 2, 2, 2]  # a and b are not here
    small.directory.holders.clear()
    assert small.match("abcd") == 0
    small.put(BERT, "ab")
    assert small.tiers_of("abcd") == [0, 0, 0, 0]


def test_a_copy_of_another_nodes_block_is_evicted_first_and_written_to_no_drive():
    small = SmallPeers({"n1": 2}, num_segments=1)
    small.put(ANNA, [f"k{i}" for i in range(14)])
    small.settle()
    grant = small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.end(fetch, [0, 1])
    small.store.release(ANNA, grant.lease_id, 0.0)
    assert small.orders() == []
    small.directory.holders.clear()
    small.put(BERT, ["z"])
    assert (small.match("ab"), small.match([f"k{i}" for i in range(14)])) == (1, 14)


def test_events_tell_of_it_so_that_others_can_fetch_it_here():
    small = SmallPeers({"n1": 2})
    small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.end(fetch, [0, 1])
    stored = [event for event in small.events if isinstance(event, BlockStored)]
    assert [len(event.hashes) for event in stored] == [1, 1]


def test_without_room_the_run_ends():
    small = SmallPeers({"n1": 30}, num_segments=1)
    small.acquire(BERT, "xy")  # nobody has them
    grant = small.acquire(ANNA, [f"n{i}" for i in range(30)])
    assert grant.num_blocks == 14


@pytest.mark.parametrize("problem", sorted(PEER_AT_FAULT))
def test_a_peer_that_fails_is_suspect_at_once_and_another_holder_is_asked(problem: LoanProblem):
    small = SmallPeers({"n1": 4, "n2": 4})
    grant = small.acquire(ANNA, "abcd")
    (fetch,) = small.fetches()
    small.end(fetch, [0])
    small.end(fetch, [1], problem)
    assert small.store.suspects(0.0) == [fetch.node_id]
    small.end(fetch, [2, 3], problem)

    (again,) = small.fetches()
    assert (again.node_id, small.fetched(again)) == (({"n1", "n2"} - {fetch.node_id}).pop(), ["b", "c", "d"])
    assert again.arena_offsets == fetch.arena_offsets[1:]
    small.end(again, [0, 1, 2])
    assert small.announced(grant) == [True] * 4
    assert small.counter("retried_fetches_total") == 1
    assert small.counter(f"failed_fetches_{problem}_total") == 3


def test_what_no_peer_gives_is_given_up_and_the_rest_stays():
    small = SmallPeers({"n1": 4})
    grant = small.acquire(ANNA, "abcd", request_id="r")
    (fetch,) = small.fetches()
    small.end(fetch, [0, 3])
    small.end(fetch, [1, 2], LoanProblem.CORRUPT)
    assert small.fetches() == []
    assert small.announced(grant) == [True, False, False, True]
    small.store.release(ANNA, grant.lease_id, 0.0)
    small.directory.holders.clear()
    assert small.match("abcd") == 1
    assert small.tier().ready_blocks == 2


@pytest.mark.parametrize("problem", [LoanProblem.ABSENT, LoanProblem.STALE, LoanProblem.REFUSED])
def test_a_peer_that_is_well_is_not_blamed_for_what_it_has_not(problem: LoanProblem):
    small = SmallPeers({"n1": 2})
    small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.end(fetch, [0, 1], problem)
    assert small.store.suspects(0.0) == []
    assert small.tier().free_bytes == small.tier().capacity_bytes


def test_a_suspect_is_tried_again_after_its_pause_on_a_few_blocks_until_it_is_well():
    small = SmallPeers({"n1": 40})
    names = [f"n{i}" for i in range(40)]
    small.acquire(ANNA, names)
    (fetch,) = small.fetches()
    small.end(fetch, range(40), LoanProblem.GONE)
    assert small.match(names) == 0
    later_s = PEER_RETRY_S[0]
    grant = small.acquire(ANNA, names, now_s=later_s)
    (probe,) = small.fetches()
    assert 0 < grant.num_blocks < 40
    assert small.store.match(small.namespace, small.keys(["x", "y"]), later_s).num_blocks == 0  # one probe at a time

    small.end(probe, range(grant.num_blocks), LoanProblem.GONE, later_s)
    assert small.store.suspects(later_s + 1.9 * PEER_RETRY_S[0]) == ["n1"]  # twice as long
    later_s += 2 * PEER_RETRY_S[0]
    small.acquire(BERT, names, now_s=later_s)
    (probe,) = small.fetches()
    small.end(probe, range(len(probe.arena_offsets)), None, later_s)
    assert small.store.match(small.namespace, small.keys(names), later_s).num_blocks == 40


def test_nobody_waits_any_more_then_the_fetch_is_called_off_and_not_tried_elsewhere():
    small = SmallPeers({"n1": 2, "n2": 2})
    grant = small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.store.release(ANNA, grant.lease_id, 0.0)
    assert small.fetches() == []
    assert small.cancels == [fetch.fetch_id]
    small.end(fetch, [0, 1], LoanProblem.CANCELLED)
    assert small.fetches() == []
    assert small.store.suspects(0.0) == []
    assert small.tier().free_bytes == small.tier().capacity_bytes


def test_what_was_called_off_and_is_wanted_again_is_fetched_again():
    small = SmallPeers({"n1": 2})
    grant = small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.store.release(ANNA, grant.lease_id, 0.0)
    assert small.fetches() == []
    again = small.acquire(BERT, "ab")
    assert small.fetches() == []
    small.end(fetch, [0, 1], LoanProblem.CANCELLED)
    (fetch,) = small.fetches()
    small.end(fetch, [0, 1])
    assert small.announced(again) == [True, True]


def test_what_waits_for_a_node_that_failed_is_called_off_and_asked_of_another():
    small = SmallPeers({"n1": 4})
    grants = [small.acquire(ANNA, "abcd"), small.acquire(BERT, "wxyz")]
    failing, waiting = small.fetches()
    small.directory.holders["n2"] = 4
    small.end(failing, [0], LoanProblem.TIMEOUT)
    assert small.fetches() == []
    assert set(small.cancels) == {failing.fetch_id, waiting.fetch_id}
    small.end(waiting, range(4), LoanProblem.CANCELLED)
    small.end(failing, range(1, 4), LoanProblem.TIMEOUT)
    for fetch in small.fetches():
        assert fetch.node_id == "n2"
        small.end(fetch, range(4))
    assert [small.announced(grant) for grant in grants] == [[True] * 4] * 2
    assert small.counter("suspected_peers_total") == 1


def test_a_node_that_failed_is_not_tried_again_for_the_same_blocks():
    small = SmallPeers({"n1": 2})
    small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.end(fetch, [0], LoanProblem.TIMEOUT)
    small.end(fetch, [1], LoanProblem.TIMEOUT, now_s=2 * PEER_RETRY_S[0])  # its pause is over
    assert small.fetches() == []


def test_a_long_fetch_is_ordered_in_parts_each_with_the_time_of_those_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.borrowing._FETCH_BYTES", 2 * PAGE)
    small = SmallPeers({"n1": 6})
    small.put(ANNA, "a")
    grant = small.acquire(ANNA, "abcdef")
    fetches = small.fetches()
    assert [small.fetched(fetch) for fetch in fetches] == [["b", "c"], ["d", "e"], ["f"]]
    assert [fetch.first for fetch in fetches] == [1, 3, 5]
    assert [len(fetch.keys) for fetch in fetches] == [3, 5, 6]
    deadlines = [fetch.deadline_s for fetch in fetches]
    assert deadlines == sorted(set(deadlines))
    for fetch in reversed(fetches):
        small.end(fetch, range(len(fetch.arena_offsets)))
    assert small.announced(grant) == [True] * 6


def test_a_slot_that_may_still_be_written_to_is_nobodys_until_it_is_settled():
    small = SmallPeers({"n1": 1}, num_segments=1)
    grant = small.acquire(ANNA, "a")
    (fetch,) = small.fetches()
    small.store.finish_fetches([FetchDone(fetch.fetch_id, 0, LoanProblem.TIMEOUT, settled=False)], 0.0)
    small.store.check()
    assert small.announced(grant) == [False]
    assert small.tier().limbo_bytes == PAGE
    assert small.tier().free_bytes == SEGMENT - PAGE
    small.store.finish_fetches([FetchDone(fetch.fetch_id, 0, LoanProblem.TIMEOUT)], 0.0)
    assert small.tier().free_bytes == SEGMENT


def test_a_block_dropped_on_its_way_is_gone_when_it_comes():
    small = SmallPeers({"n1": 2})
    grant = small.acquire(ANNA, "ab")
    (fetch,) = small.fetches()
    small.store.drop(small.namespace, small.keys("a"))
    small.directory.holders.clear()
    small.end(fetch, [0, 1])
    small.store.release(ANNA, grant.lease_id, 0.0)
    assert small.match("ab") == 0
    assert small.tier().free_bytes == small.tier().capacity_bytes


def test_of_nodes_that_come_and_go_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(borrowing, "MAX_REMEMBERED_PEERS", 8)
    small = SmallPeers({"busy": 4})
    small.acquire(ANNA, "abcd")
    (fetch,) = small.fetches()
    for number in range(40):
        small.directory.holders = {f"pod-{number}": 6}
        assert small.match("abcdef") == 6
        small.store.check()
    assert small.store._borrowing is not None
    assert len(small.store._borrowing._nodes) <= 8
    small.end(fetch, range(4))
    assert small.store.peer_figures("busy", 0.0).fetched_bytes == 4 * PAGE


def test_what_an_engine_here_writes_is_not_fetched():
    small = SmallPeers({"n1": 4})
    small.reserve(BERT, "ab")
    assert small.match("abcd") == 0
    small.acquire(ANNA, "abcd")
    assert small.fetches() == []


def test_a_prefetch_brings_blocks_of_peers_for_nobody_yet():
    small = SmallPeers({"n1": 3})
    prefetch = small.store.prefetch(small.namespace, small.keys("abc"), 0, 0.0)
    (fetch,) = small.fetches()
    assert (prefetch.num_blocks, prefetch.num_started, small.fetched(fetch)) == (3, 3, ["a", "b", "c"])
    grant = small.acquire(ANNA, "abc")
    assert small.fetches() == []
    small.end(fetch, [0, 1, 2])
    assert small.announced(grant) == [True] * 3


def test_random_walks_keep_every_invariant():
    for seed in range(12):
        rng = np.random.default_rng(seed)
        small = SmallPeers({"n1": 6, "n2": 9}, num_segments=2, drives=(2,))
        open_fetches: list[tuple[Fetch, set[int]]] = []
        leases: list[tuple[Holder, ReadGrant]] = []
        now_s = 0.0
        for _ in range(60):
            now_s += float(rng.uniform(0, 0.4))
            sequence = rng.integers(3)
            names = [f"{sequence}-{i}" for i in range(int(rng.integers(1, 11)))]
            match int(rng.integers(6)):
                case 0:
                    small.put(ANNA, names, now_s=now_s)
                case 1 | 2:
                    holder = (ANNA, BERT)[int(rng.integers(2))]
                    grant = small.acquire(holder, names, first_needed=int(rng.integers(3)), now_s=now_s)
                    if grant.lease_id:
                        leases.append((holder, grant))
                case 3 if leases:
                    holder, grant = leases.pop(int(rng.integers(len(leases))))
                    small.store.renew(holder, [grant.lease_id], 30.0, now_s)
                    with contextlib.suppress(UnknownLease):  # nothing of it came, so it ended by itself
                        small.store.release(holder, grant.lease_id, now_s)
                case 4:
                    small.store.drop(small.namespace, small.keys(names[:1]))
                case 5:
                    small.settle(now_s)
            open_fetches += [(fetch, set(range(len(fetch.arena_offsets)))) for fetch in small.fetches()]
            for fetch, left in open_fetches:
                if left and rng.random() < 0.5:
                    some = [i for i in sorted(left) if rng.random() < 0.6]
                    problem = None if rng.random() < 0.6 else sorted(LoanProblem)[int(rng.integers(len(LoanProblem)))]
                    left.difference_update(some)
                    small.end(fetch, some, problem, now_s)
