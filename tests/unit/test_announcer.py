"""What the directory is told is what the store holds, whatever happens to blocks and in whatever order."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from small_spill import SmallSpill
from small_store import SmallStore

from kvstore.cluster import Announcer, Cluster
from kvstore.core.blocks import Holder

ANNA = Holder(b"anna" * 4, 1)
NAMES = [f"{sequence}-{i}" for sequence in range(4) for i in range(6)]


class FakeDirectory:
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        self.told: set[tuple[bytes, bytes]] = set()
        self.num_calls = self.num_resyncs = 0
        self.resync_needed = False

    def publish(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        self.num_calls += 1
        self.told.update((namespace, key) for key in hashes)

    def withdraw(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        self.num_calls += 1
        self.told.difference_update((namespace, key) for key in hashes)

    def resync(self) -> None:
        self.num_resyncs += 1
        self.told.clear()
        self.resync_needed = False


def announced(small: SmallStore, announcer: Announcer) -> None:
    """All events since the last call reach the announcer, which then tells."""
    for event in small.events:
        announcer.on_event(event)
    small.events.clear()
    announcer.tell()


def held(small: SmallStore) -> set[tuple[bytes, bytes]]:
    return {(small.namespace, key) for key in small.keys(NAMES) if small.store.holds(small.namespace, key)}


def test_a_block_withdrawn_and_stored_again_in_one_turn_is_there() -> None:
    small, directory = SmallStore(), FakeDirectory()
    announcer = Announcer(directory, small.store.holds)  # type: ignore[arg-type]
    small.put(ANNA, NAMES[:3])
    small.store.drop(small.namespace, small.keys(NAMES[:1]))
    small.put(ANNA, NAMES[:2])
    announced(small, announcer)
    assert directory.told == held(small) == {(small.namespace, key) for key in small.keys(NAMES[:2])}

    small.store.drop(small.namespace, small.keys(NAMES[:1]))
    small.put(ANNA, NAMES[:2])
    small.store.drop(small.namespace, small.keys(NAMES[:1]))
    announced(small, announcer)
    assert directory.told == held(small) == set()


def test_a_block_that_leaves_ram_for_a_drive_stays() -> None:
    small, directory = SmallSpill(num_segments=1, drives=(4,)), FakeDirectory()
    announcer = Announcer(directory, small.store.holds)  # type: ignore[arg-type]
    small.put(ANNA, NAMES[:6])
    small.settle()
    small.put(ANNA, [f"x{i}" for i in range(14)])
    small.settle()
    announced(small, announcer)
    assert 1 in small.tiers_of(NAMES[:6])
    assert held(small) <= directory.told


def test_random_walks_with_and_without_drives_tell_what_is_held() -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        small = SmallSpill(num_segments=1, drives=(1,)) if seed % 2 else SmallStore(num_segments=1)
        directory = FakeDirectory()
        announcer = Announcer(directory, small.store.holds)  # type: ignore[arg-type]
        for step in range(120):
            names = [f"{rng.integers(4)}-{i}" for i in range(int(rng.integers(1, 7)))]
            names = [f"{names[0][0]}-{i}" for i in range(len(names))]
            match int(rng.integers(5)):
                case 0 | 1 | 2:
                    small.put(ANNA, names, now_s=step * 0.1)
                case 3:
                    small.store.drop(small.namespace, small.keys(names[-1:]))
                case 4 if isinstance(small, SmallSpill):
                    small.settle(step * 0.1)
            if rng.random() < 0.4:
                announced(small, announcer)
                assert directory.told == held(small)


def make_cluster(store: Any, directory: FakeDirectory, loop: asyncio.AbstractEventLoop) -> Cluster:
    """As after `join`, without links."""
    cluster = Cluster.__new__(Cluster)
    cluster._store, cluster._directory, cluster._loop = store, directory, loop  # type: ignore[assignment]
    cluster._mover = SimpleNamespace(submit=None, cancel=None)  # type: ignore[assignment]
    cluster._announcer = Announcer(directory, store.holds)  # type: ignore[arg-type]
    cluster._replication = None
    cluster._resyncing, cluster._resync_again, cluster._pump_due = None, False, False
    return cluster


def test_events_are_told_though_no_verb_follows() -> None:
    async def run() -> None:
        small, directory = SmallStore(), FakeDirectory()
        cluster = make_cluster(small.store, directory, asyncio.get_running_loop())
        small.put(ANNA, NAMES[:3])
        for event in small.events:
            cluster.on_event(event)
        assert not directory.told
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert directory.told == held(small)

    asyncio.run(run())


def test_a_resync_tells_all_and_starts_anew_when_it_is_asked_for_meanwhile() -> None:
    async def run() -> None:
        small, directory = SmallStore(), FakeDirectory()
        small.put(ANNA, NAMES[:6])
        cluster = make_cluster(small.store, directory, asyncio.get_running_loop())
        cluster.announce_all()
        await asyncio.sleep(0)
        small.put(ANNA, NAMES[6:12])  # restored from a drive: no event
        cluster.announce_all()
        assert cluster._resyncing is not None
        await cluster._resyncing
        assert directory.num_resyncs == 2
        assert directory.told == held(small)

        directory.resync_needed = True
        directory.told.clear()
        cluster.pump()
        await cluster._resyncing
        assert directory.told == held(small)

    asyncio.run(run())


def test_events_during_a_resync_are_not_lost() -> None:
    async def run() -> None:
        small, directory = SmallStore(), FakeDirectory()
        small.put(ANNA, NAMES[:6])
        small.events.clear()
        cluster = make_cluster(small.store, directory, asyncio.get_running_loop())
        cluster.announce_all()
        await asyncio.sleep(0)  # the first slice is out
        small.put(ANNA, NAMES[6:9])
        small.store.drop(small.namespace, small.keys(NAMES[:1]))
        for event in small.events:
            cluster.on_event(event)
        assert cluster._resyncing is not None
        await cluster._resyncing
        assert directory.told == held(small)

    asyncio.run(run())
