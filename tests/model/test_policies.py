"""Every policy on random forests, through the index and the inventory that the store has."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from forests import ReferenceCache, random_requests

from kvstore.eviction import POLICIES, make_policy
from kvstore.replay.belady import most_hits
from kvstore.replay.cache import ReplayCache, block_key
from kvstore.replay.trace import read_trace

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("seed", range(12))
def test_replay_of_lru_hits_what_the_reference_hits(seed: int) -> None:
    capacity = 3 + 5 * seed
    cache, reference = ReplayCache(capacity, make_policy("lru")), ReferenceCache(capacity)

    for blocks in random_requests(seed):
        assert cache.request(blocks) == reference.request(blocks)
        cache.check()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_policy_keeps_a_block_without_all_before_it(name: str, seed: int) -> None:
    """`check` asserts it, and that whatever may go would be returned. Some blocks are cooled, held by a reader, or dropped."""
    draw = random.Random(seed)
    cache = ReplayCache(10 + 12 * seed, make_policy(name))
    held: list[np.ndarray] = []

    for blocks in random_requests(seed):
        cache.request(blocks)
        rows = np.flatnonzero(cache.blocks.table.state == 2)
        chosen = rows[draw.randrange(len(rows))] if len(rows) else None
        action = draw.choice(["cool", "hold", "release", "drop", "nothing"])
        if action == "cool" and chosen is not None:
            cache.policy.cool([int(chosen)])
        elif action == "hold" and chosen is not None and not held:
            held.append(np.array([chosen]))
            cache.blocks.ref(held[0])
        elif action == "release" and held:
            cache.blocks.unref(held.pop())
        elif action == "drop" and chosen is not None and not held:
            below = cache.index.with_descendants(np.array([chosen]))
            cache.blocks.drop(cache.index.namespace_of(int(chosen)), below)
            cache.index.forget_dead(below)
        cache.check()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_up_everything_that_may_go(name: str) -> None:
    cache = ReplayCache(40, make_policy(name))
    for blocks in random_requests(7):
        cache.request(blocks)
    num_blocks = cache.blocks.table.num_placed()

    assert cache.blocks.evict(num_blocks + 1, 1).num_blocks == num_blocks
    assert cache.policy.next_victim() is None


@pytest.mark.parametrize("name", POLICIES)
def test_cooled_blocks_go_first_tail_before_head(name: str) -> None:
    cache = ReplayCache(6, make_policy(name))
    cache.request([1, 2, 3])
    cache.request([4, 5, 6])
    entry = cache.index.namespace_of(0)
    cache.policy.cool([entry.rows[block_key(6)], entry.rows[block_key(5)]])

    cache.request([7, 8])

    assert {block_key(number) for number in (1, 2, 3, 4, 7, 8)} == entry.rows.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_one_that_knows_what_comes(name: str) -> None:
    for seed in range(3):
        requests = random_requests(seed)
        for capacity in (5, 20, 60):
            cache = ReplayCache(capacity, make_policy(name))
            assert sum(cache.request(blocks) for blocks in requests) <= most_hits(requests, capacity)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_requests_give_the_same_victims(name: str) -> None:
    requests = random_requests(3, num_requests=200)
    runs = []
    for _ in range(2):
        cache = ReplayCache(25, make_policy(name))
        runs.append([cache.request(blocks) for blocks in requests])

    assert runs[0] == runs[1]


class ReferenceArc:
    """ARC as published, for single blocks, but that the victim is chosen before the block is looked up among the evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.once: list[int] = []
        self.again: list[int] = []
        self.evicted_once: list[int] = []
        self.evicted_again: list[int] = []

    def request(self, block: int) -> bool:
        once, again, evicted_once, evicted_again = self.once, self.again, self.evicted_once, self.evicted_again
        for blocks in (once, again):
            if block in blocks:
                blocks.remove(block)
                again.append(block)
                return True
        if len(once) + len(again) == self.capacity:
            is_once = len(once) > self.target or not again
            (evicted_once if is_once else evicted_again).append((once if is_once else again).pop(0))
        if block in evicted_once:
            self.target = min(self.target + max(1, len(evicted_again) / len(evicted_once)), self.capacity)
            evicted_once.remove(block)
            again.append(block)
        elif block in evicted_again:
            self.target = max(self.target - max(1, len(evicted_once) / len(evicted_again)), 0)
            evicted_again.remove(block)
            again.append(block)
        else:
            once.append(block)
        while evicted_once and len(once) + len(evicted_once) > self.capacity:
            evicted_once.pop(0)
        while evicted_again and len(evicted_once) + len(evicted_again) > self.capacity:
            evicted_again.pop(0)
        return False


@pytest.mark.parametrize("seed", range(4))
def test_arc_hits_single_blocks_as_its_reference_does(seed: int) -> None:
    draw = random.Random(seed)
    cache, reference = ReplayCache(10 + 10 * seed, make_policy("arc")), ReferenceArc(10 + 10 * seed)
    targets = set()

    for turn in range(3000):
        block = int(draw.paretovariate(0.6)) + turn // 500 if draw.random() < 0.8 else 10**6 + turn
        assert cache.request([block]) == reference.request(block)
        targets.add(reference.target)

    assert len(targets) > 5  # it has learnt


@pytest.mark.parametrize(("file", "capacity"), [("conversation_trace_1000", 1000), ("agentic_trace_400", 300)])
def test_the_default_is_no_worse_than_lru_on_excerpts_of_traces(file: str, capacity: int) -> None:
    trace = read_trace(DATA / f"{file}.jsonl.gz")
    hits = {}
    for name in ("lru", "adaptive"):
        cache = ReplayCache(capacity, make_policy(name))
        hits[name] = sum(cache.request(request.blocks) for request in trace.requests)

    assert hits["lru"] > 0
    assert hits["adaptive"] >= hits["lru"] - 0.002 * trace.num_references
    assert hits["adaptive"] <= most_hits([request.blocks for request in trace.requests], capacity)


def test_a_scan_does_not_flush_what_the_default_knows_to_come_back() -> None:
    """Six sessions that return, and between two returns more blocks that nobody wants again than the tier holds."""
    hits = {}
    for name in ("lru", "adaptive"):
        cache = ReplayCache(200, make_policy(name))
        once = 10_000
        hits[name] = 0
        for turn in range(600):
            session = turn % 6 * 100
            hits[name] += cache.request(list(range(session, session + 8)))
            cache.request(list(range(once, once + 30)))
            once += 30

    assert hits["lru"] == 0
    assert hits["adaptive"] > 0.3 * 600 * 8


def test_a_loop_that_does_not_fit_hits_what_is_kept_of_it() -> None:
    """20 documents of 16 blocks in turn, in a tier of three quarters of them: the oldest one is always the next."""
    hits = {}
    for name in ("lru", "adaptive"):
        cache = ReplayCache(240, make_policy(name))
        hits[name] = sum(cache.request(list(range(turn % 20 * 100, turn % 20 * 100 + 16))) for turn in range(1000))

    assert hits["lru"] == 0
    assert hits["adaptive"] > 0.5 * 1000 * 16
