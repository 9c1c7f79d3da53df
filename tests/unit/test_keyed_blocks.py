"""Blocks by key in one call: what is counted is right, nothing is raised, and no lease or slot stays behind."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from in_process_sidecar import InProcessClient, InProcessSidecar
from numpy.typing import NDArray

from kvstore.core.keys import KVSpec
from kvstore.core.limits import DEFAULT_LEASE_TTL_S
from kvstore.engine_connector.keyed_blocks import KeyedBlocks
from kvstore.engine_connector.session import StoreSession

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
SPACE, NBYTES = SPEC.namespace(), SPEC.block_nbytes
KEYS = SPEC.hash.hash_blocks(range(16 * 40))
OTHER_KEYS = SPEC.hash.hash_blocks(range(1000, 1000 + 16 * 40))


class Memory:
    """An engine's pages, one for each key of a call."""

    def __init__(self, num_pages: int, seed: int = 0) -> None:
        self.pages = np.random.default_rng(seed).integers(0, 256, (num_pages, NBYTES), np.uint8)

    def copy_in(self, i: int, block: NDArray[np.uint8]) -> None:
        self.pages[i] = block

    def copy_out(self, i: int, block: NDArray[np.uint8]) -> None:
        block[:] = self.pages[i]


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


@pytest.fixture
def open_blocks(sidecar: InProcessSidecar, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], KeyedBlocks]]:
    """Each an engine of its own."""
    monkeypatch.setattr(
        StoreSession, "live_boot_id", property(lambda session: session.boot_id)
    )  # of a client in this process
    sessions: list[StoreSession] = []
    instances = itertools.count(1)

    def start() -> KeyedBlocks:
        session = StoreSession(
            InProcessClient(sidecar, SPEC, next(instances).to_bytes(16, "little")), backoff_s=(0.001, 0.004)
        )
        session.start()
        sessions.append(session)
        return KeyedBlocks(session)

    yield start
    for session in sessions:
        session.close()


def test_what_one_engine_saves_another_loads(open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar) -> None:
    first, second = open_blocks(), open_blocks()
    saved, loaded = Memory(5), Memory(8, seed=1)

    assert first.save(SPACE, KEYS[:5], NBYTES, saved.copy_out) == 5

    assert second.count_held(SPACE, KEYS[:8]) == 5
    assert second.load(SPACE, KEYS[:8], NBYTES, loaded.copy_in) == 5
    assert np.array_equal(loaded.pages[:5], saved.pages)
    sidecar.check_no_lease()


def test_blocks_that_are_held_are_not_written_again(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    blocks = open_blocks()
    blocks.save(SPACE, KEYS[:5], NBYTES, Memory(5).copy_out)
    written: list[int] = []

    num_held = blocks.save(SPACE, KEYS[2:7], NBYTES, lambda i, _: written.append(i), parent=KEYS[1])

    assert (num_held, written) == (5, [3, 4])
    sidecar.check_no_lease()


def test_which_keys_are_held_is_told_one_by_one(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    blocks = open_blocks()
    for i in (0, 2, 3):
        blocks.save(SPACE, KEYS[i : i + 1], NBYTES, Memory(1).copy_out)

    assert blocks.held_each(SPACE, KEYS[:5]) == [True, False, True, True, False]

    sidecar.away = True
    assert blocks.held_each(SPACE, KEYS[:5]) == [False] * 5


def test_a_full_store_takes_the_first_ones(open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar) -> None:
    blocks = open_blocks()
    capacity = sidecar.arena.array.nbytes // 4096  # a slot is at least a page of memory
    keys = SPEC.hash.hash_blocks(range(16 * (capacity + 10)))

    assert blocks.save(SPACE, keys, NBYTES, Memory(len(keys)).copy_out) == capacity
    assert blocks.count_held(SPACE, keys) == capacity
    sidecar.check_no_lease()


def test_keys_whose_parent_is_lost_are_stored_all_the_same(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    """Its engine has the parent itself, and asks for what is behind it only."""
    blocks = open_blocks()
    saved, loaded = Memory(2), Memory(2, seed=1)

    assert blocks.save(SPACE, KEYS[5:7], NBYTES, saved.copy_out, parent=KEYS[4]) == 2

    assert blocks.load(SPACE, KEYS[5:7], NBYTES, loaded.copy_in) == 2
    assert np.array_equal(loaded.pages, saved.pages)
    sidecar.check_no_lease()


def test_parents_are_known_so_that_the_last_blocks_go_first(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    blocks = open_blocks()
    capacity = sidecar.arena.array.nbytes // 4096
    for first in range(0, 40, 10):
        parent = KEYS[first - 1] if first else b""
        blocks.save(SPACE, KEYS[first : first + 10], NBYTES, Memory(10).copy_out, parent=parent)
    others = SPEC.hash.hash_blocks(range(5000, 5000 + 16 * (capacity - 30)))

    blocks.save(SPACE, others, NBYTES, Memory(len(others)).copy_out)

    assert blocks.count_held(SPACE, KEYS) == 30
    assert blocks.count_held(SPACE, KEYS[30:]) == 0


def test_without_a_sidecar_nothing_is_found_and_nothing_raised(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    sidecar.away = True
    blocks, memory = open_blocks(), Memory(3)
    before = memory.pages.copy()

    assert blocks.count_held(SPACE, KEYS[:3]) == 0
    assert blocks.load(SPACE, KEYS[:3], NBYTES, memory.copy_in) == 0
    assert blocks.save(SPACE, KEYS[:3], NBYTES, memory.copy_out) == 0
    assert np.array_equal(memory.pages, before)


def test_a_block_whose_slot_changes_under_the_copy_is_not_loaded(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    blocks = open_blocks()
    blocks.save(SPACE, KEYS[:4], NBYTES, Memory(4).copy_out)

    def copy_and_lose(i: int, _: NDArray[np.uint8]) -> None:
        if i == 2:
            sidecar.arena.generations[:] += 1

    assert blocks.load(SPACE, KEYS[:4], NBYTES, copy_and_lose) == 2


def test_a_copy_that_raises_gives_its_lease_back(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    blocks = open_blocks()
    blocks.save(SPACE, KEYS[:2], NBYTES, Memory(2).copy_out)

    def fail(i: int, block: NDArray[np.uint8]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        blocks.load(SPACE, KEYS[:2], NBYTES, fail)
    with pytest.raises(ZeroDivisionError):
        blocks.save(SPACE, OTHER_KEYS[:2], NBYTES, fail)

    sidecar.check_no_lease()
    assert blocks.count_held(SPACE, OTHER_KEYS[:2]) == 0


def test_after_a_lost_connection_no_slot_stays_in_limbo(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    """The grant's reply was lost, so nobody can give back what it granted, except by saying that nobody uses it."""
    blocks = open_blocks()
    sidecar.lose_next_reply = True
    assert blocks.save(SPACE, KEYS[:3], NBYTES, Memory(3).copy_out) == 0
    assert sidecar.limbo_bytes > 0

    for _ in range(1000):  # until it is connected again
        blocks.count_held(SPACE, OTHER_KEYS[:1])
        if not sidecar.limbo_bytes:
            break
        time.sleep(0.002)

    sidecar.check_no_lease()


def test_a_copy_of_an_earlier_connection_keeps_its_slot_in_limbo_until_it_ends(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    blocks = open_blocks()
    copying, go_on = threading.Event(), threading.Event()

    def slow_copy(i: int, block: NDArray[np.uint8]) -> None:
        copying.set()
        assert go_on.wait(10.0)

    thread = threading.Thread(target=blocks.save, args=(SPACE, KEYS[:1], NBYTES, slow_copy))
    thread.start()
    assert copying.wait(10.0)
    sidecar.lose_next_reply = True  # of another thread's call: the connection is lost, and comes back
    blocks.count_held(SPACE, OTHER_KEYS[:1])
    for _ in range(1000):
        if blocks.save(SPACE, OTHER_KEYS[:1], NBYTES, Memory(1).copy_out):
            break
        time.sleep(0.002)
    assert sidecar.limbo_bytes > 0

    go_on.set()
    thread.join(10.0)
    blocks.count_held(SPACE, KEYS[:1])

    sidecar.check_no_lease()


def test_a_stalled_copy_of_the_new_connection_keeps_its_slot_in_limbo_too(
    open_blocks: Callable[[], KeyedBlocks], sidecar: InProcessSidecar
) -> None:
    """Its lease has expired under it, and it still writes, when another call says that those of earlier connections ended."""
    blocks = open_blocks()
    go_on = {0: threading.Event(), 1: threading.Event()}

    def start_slow_save(number: int) -> threading.Thread:
        copying = threading.Event()

        def slow_copy(i: int, block: NDArray[np.uint8]) -> None:
            copying.set()
            assert go_on[number].wait(10.0)

        arguments = (SPACE, KEYS[number : number + 1], NBYTES, slow_copy)
        thread = threading.Thread(target=blocks.save, args=arguments)
        thread.start()
        assert copying.wait(10.0)
        return thread

    first = start_slow_save(0)
    sidecar.lose_next_reply = True
    blocks.count_held(SPACE, OTHER_KEYS[:1])
    for _ in range(1000):
        if blocks.save(SPACE, OTHER_KEYS[:1], NBYTES, Memory(1).copy_out):
            break
        time.sleep(0.002)
    second = start_slow_save(1)
    go_on[0].set()
    first.join(10.0)
    sidecar.clock.advance(2 * DEFAULT_LEASE_TTL_S)

    blocks.count_held(SPACE, OTHER_KEYS[:1])
    limbo_bytes = sidecar.limbo_bytes
    go_on[1].set()
    second.join(10.0)
    blocks.count_held(SPACE, OTHER_KEYS[:1])

    assert limbo_bytes > 0
    assert blocks.count_held(SPACE, KEYS[1:2]) == 0
    sidecar.check_no_lease()
