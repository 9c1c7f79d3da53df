"""What engines say of their own pools: who has what, what others hear of it, how much is noted, and when it is forgotten."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_spill import SmallSpill
from small_store import SmallStore

from kvstore.core.blocks import Holder
from kvstore.core.errors import Overloaded, RemoteProtocolError, SpecMismatch
from kvstore.core.events import BlockRemoved, BlockStored, Event, RemovalReason
from kvstore.core.keys import pack_keys
from kvstore.core.limits import MAX_REPORTED_BLOCKS, MAX_REPORTED_RUNS
from kvstore.eviction import make_policy
from kvstore.presence import HeldRun, PoolHolding, PoolReport, Presence
from kvstore.presence_messages import read_pool_report
from kvstore.proto import kvstore_pb2 as pb

SPACE = b"n" * 16
ANNA, BERT = Holder(b"anna" * 4, 1), Holder(b"bert" * 4, 2)


class Node:
    """A Presence, and what a router believes that hears its events. Letters are keys; a run begins behind `parent`."""

    def __init__(self, **limits: int) -> None:
        self.events: list[Event] = []
        self.counters: dict[str, int] = Counter()
        self.presence = Presence(self.events.append, self.counters, **limits)

    def report(
        self, holder: Holder, stored: str = "", removed: str = "", *, parent: str = "", cleared: bool = False
    ) -> None:
        runs = [HeldRun(key(parent) if parent else b"", keys(stored))] if stored else []
        self.presence.report(holder, SPACE, PoolReport(cleared, keys(removed), runs, 0), 100)
        self.presence.check()

    def believed(self) -> set[bytes]:
        held: set[bytes] = set()
        for event in self.events:
            assert (event.namespace, event.tier) == (SPACE, "hbm")
            assert event.nbytes == 100 * len(event.hashes)
            if isinstance(event, BlockStored):
                assert not held & set(event.hashes), "told twice"
                held |= set(event.hashes)
            else:
                assert held >= set(event.hashes), "taken back what was never told"
                held -= set(event.hashes)
        return held


def key(letter: str) -> bytes:
    return letter.encode() * 16


def keys(letters: str) -> list[bytes]:
    return [key(letter) for letter in letters]


def test_others_hear_of_a_block_when_the_first_engine_has_it_and_when_the_last_one_has_not() -> None:
    node = Node()
    node.report(ANNA, "abc")
    node.report(BERT, "abcd")
    node.report(ANNA, removed="abc")
    node.report(BERT, removed="c")

    assert node.events == [
        BlockStored(SPACE, "hbm", b"", tuple(keys("abc")), 300),
        BlockStored(SPACE, "hbm", key("c"), tuple(keys("d")), 100),
        BlockRemoved(SPACE, "hbm", tuple(keys("c")), 100, RemovalReason.EVICTED),
    ]
    assert node.presence.instances_with(SPACE, key("a")) == [BERT.instance]
    assert node.presence.instances_with(SPACE, key("c")) == []


def test_blocks_that_do_not_follow_each_other_are_told_as_runs_of_their_own() -> None:
    node = Node()
    node.report(ANNA, "bc", parent="a")
    node.presence.report(
        BERT, SPACE, PoolReport(False, (), [HeldRun(b"", keys("abcd")), HeldRun(key("b"), keys("x"))], 0), 100
    )

    assert [(event.parent, event.hashes) for event in node.events[1:]] == [
        (b"", (key("a"),)),
        (key("c"), (key("d"),)),
        (key("b"), (key("x"),)),
    ]


def test_a_report_first_clears_then_removes_then_stores() -> None:
    node = Node()
    node.report(ANNA, "abc")
    node.report(ANNA, "ab", removed="a", cleared=True)

    assert node.believed() == set(keys("ab"))
    assert node.presence.holdings(SPACE, keys("abc")) == [PoolHolding(ANNA.instance, 2)]


def test_what_a_connection_told_is_forgotten_with_it_and_what_another_told_is_not() -> None:
    node = Node()
    node.report(ANNA, "abc")
    node.report(BERT, "ab")
    again = Holder(ANNA.instance, 7)
    node.report(again, "xy")  # it tells all anew: the first connection's end is heard late

    node.presence.end_session(ANNA)
    assert node.believed() == set(keys("abxy"))
    node.presence.end_session(again)
    assert node.believed() == set(keys("ab"))
    node.presence.end_session(BERT)

    node.presence.check()
    assert node.presence.is_empty
    assert node.presence.sizes() == []
    assert node.counters["hbm_stored_blocks_total"] == node.counters["hbm_removed_blocks_total"] == 7


@pytest.mark.parametrize("limits", [{"max_blocks": 4}, {"max_blocks_per_instance": 4}])
def test_what_is_too_much_is_not_noted_but_counted(limits: dict[str, int]) -> None:
    node = Node(**limits)
    node.report(ANNA, "abcdef")

    assert node.believed() == set(keys("abcd"))
    assert node.counters["hbm_unnoted_blocks_total"] == 2
    node.report(ANNA, "e", removed="ab", parent="d")
    assert node.believed() == set(keys("cde"))


def test_only_engines_that_opened_the_namespace_count_for_everywhere() -> None:
    node = Node()
    node.presence.join(ANNA, [SPACE])
    node.presence.join(BERT, [SPACE, b"o" * 16])
    node.report(ANNA, "ab")

    assert not node.presence.is_everywhere(SPACE, key("a"))
    node.report(BERT, "a")
    assert node.presence.is_everywhere(SPACE, key("a"))
    assert not node.presence.is_everywhere(SPACE, key("b"))
    node.presence.end_session(BERT)
    assert node.presence.is_everywhere(SPACE, key("b"))
    node.presence.end_session(ANNA)
    assert not node.presence.is_everywhere(SPACE, key("b")), "nobody is there"


def test_who_comes_late_is_told_what_is_held_then() -> None:
    node = Node()
    node.report(ANNA, "abc")
    node.report(BERT, "bcd", parent="a")
    ((space, held),) = node.presence.snapshot()
    node.report(ANNA, removed="a")

    events = [event for part in (held[:2], held[2:]) for event in node.presence.held_events(space, part)]

    assert [(event.parent, event.hashes) for event in events] == [
        (key("a"), (key("b"),)),
        (key("b"), tuple(keys("cd"))),
    ]


reports = st.tuples(
    st.sampled_from([ANNA, BERT, Holder(ANNA.instance, 3)]), st.text("abcdef"), st.text("abcdef"), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(reports, st.sampled_from([ANNA, BERT])), max_size=12))
def test_a_router_that_hears_everything_believes_what_the_pools_hold(steps: list) -> None:
    node = Node(max_blocks=7)
    for step in steps:
        if isinstance(step, Holder):
            node.presence.end_session(step)
            node.presence.check()
        else:
            holder, stored, removed, cleared = step
            node.report(holder, "".join(dict.fromkeys(stored)), removed, cleared=cleared)
        held = {each for _, known in node.presence.snapshot() for each in known}
        assert node.believed() == held
        retold = [each for space, known in node.presence.snapshot() for each in node.presence.held_events(space, known)]
        assert {each for event in retold for each in event.hashes} == held


# --- what it changes in the store ----------------------------------------------------------------------------------------


def engines(small: SmallStore, *holders: Holder) -> None:
    for holder in holders:
        small.store.presence.join(holder, [small.namespace])


def has(small: SmallStore, holder: Holder, names: str) -> None:
    small.store.report_pool(holder, small.namespace, PoolReport(False, (), [HeldRun(b"", small.keys(names))], 0))
    small.store.check()


def in_ram(small: SmallSpill, names: str) -> list[bool]:
    return [tier == 0 for tier in small.tiers_of(names)]


def filled(**limits: object) -> SmallSpill:
    """An arena of one segment, full: "abcd" is on the drives too and was used last, the other 12 are older."""
    small = SmallSpill(num_segments=1, make_policy=make_policy("lru"), **limits)  # type: ignore[arg-type]
    engines(small, ANNA, BERT)
    small.put(ANNA, "efghijklmnop")
    small.put(ANNA, "abcd")
    small.settle()
    return small


def test_of_what_every_engine_has_itself_the_copy_in_ram_goes_first() -> None:
    small = filled()
    has(small, ANNA, "abcd")
    has(small, BERT, "abc")

    small.put(ANNA, "xy")

    assert in_ram(small, "efghijklmnop") == [True] * 10 + [False] * 2, "d is Anna's alone, and keeps what is before it"
    has(small, BERT, "abcd")
    small.put(ANNA, "uvw")
    assert in_ram(small, "abcd") == [True, False, False, False]
    assert in_ram(small, "efghijklmn") == [True] * 10


def test_a_copy_that_no_drive_has_is_not_given_up_for_that() -> None:
    small = SmallStore(num_segments=1)
    engines(small, ANNA)
    small.put(ANNA, "efghijklmnop")
    small.put(ANNA, "abcd")
    has(small, ANNA, "abcd")

    small.put(ANNA, "xy")

    assert small.match("abcd") == 4


def test_it_is_given_up_once_a_drive_has_it() -> None:
    small = SmallSpill(num_segments=1, make_policy=make_policy("lru"))
    engines(small, ANNA)
    small.put(ANNA, "efghijklmnop")
    small.put(ANNA, "abcd")
    has(small, ANNA, "abcd")
    small.settle()

    small.put(ANNA, "xy")

    assert in_ram(small, "abcd") == [True, True, False, False]


def test_an_engine_that_comes_later_is_not_thought_to_have_anything() -> None:
    small = filled()
    has(small, ANNA, "abcd")
    has(small, BERT, "abcd")
    engines(small, Holder(b"cleo" * 4, 3))

    small.put(ANNA, "xy")

    assert in_ram(small, "abcd") == [True] * 4


def test_pools_are_a_tier_in_the_figures_while_somebody_tells_of_them() -> None:
    small = SmallStore()
    assert [tier.name for tier in small.store.stats().tiers] == ["pinned"]
    small.store.report_pool(
        ANNA, small.namespace, PoolReport(False, (), [HeldRun(b"", small.keys("abc"))], num_blocks=10)
    )
    has(small, BERT, "ab")

    (_, tier) = small.store.stats().tiers
    nbytes = small.spec.block_nbytes

    assert (tier.name, tier.ready_blocks, tier.ready_bytes) == ("hbm", 5, 5 * nbytes)
    assert (tier.capacity_bytes, tier.free_bytes) == (12 * nbytes, 7 * nbytes)
    assert small.store.held_by_tenant() == {"": {"hbm": 5 * nbytes}}
    assert small.store.removals()[0].policy == "leaf_lru"
    small.store.end_session(ANNA, 0.0)
    small.store.end_session(BERT, 0.0)
    assert [tier.name for tier in small.store.stats().tiers] == ["pinned"]


# --- as messages -----------------------------------------------------------------------------------------------------------


def test_a_report_of_speeds_alone_says_nothing_of_the_pool() -> None:
    assert read_pool_report(pb.ReportRequest(copy_bytes=7), 16) is None


def test_what_is_wrong_in_a_report_is_named() -> None:
    packed = pack_keys(keys("ab"))
    wrong = {
        "stored.parent": pb.ReportRequest(stored=[pb.HeldRun(parent=b"short", keys=packed)]),
        "stored.keys": pb.ReportRequest(stored=[pb.HeldRun()]),
        "keys": pb.ReportRequest(removed=b"short"),
        "pool_blocks": pb.ReportRequest(pool_blocks=2**32 - 1),
    }
    for field, request in wrong.items():
        with pytest.raises((RemoteProtocolError, SpecMismatch)) as caught:
            read_pool_report(request, 16)
        assert caught.value.fields["field"] == field
    for limit, request in {
        "MAX_REPORTED_BLOCKS": pb.ReportRequest(removed=bytes(16 * (MAX_REPORTED_BLOCKS + 1))),
        "MAX_REPORTED_RUNS": pb.ReportRequest(stored=[pb.HeldRun(keys=packed)] * (MAX_REPORTED_RUNS + 1)),
    }.items():
        with pytest.raises(Overloaded) as caught:
            read_pool_report(request, 16)
        assert caught.value.fields["limit"] == limit
