"""Whole blocks by key, each call answered when it returns: for engines that store by key and have threads of their own for
it (SGLang's HiCache). Engines that schedule loads and saves as part of their steps use the two sides instead.

    count_held   Match; Prefetch for what lies on drives            how many of the keys, from the first one on
    held_each    Match                                             which of them
    load         Acquire -> copy each block as it arrives -> Release   likewise
    save         Reserve -> copy -> Commit, or Abort                   likewise

Nothing here raises because the store is absent, slow or dies: then the answer is 0, at once while the session's breaker is
open, and within a deadline otherwise. A block counts as loaded only if its slot's generation is the same before and after
the copy.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Acquired, ClientArena, Reserved
from kvstore.client_arena import Arrival, arrival_of
from kvstore.core.blocks import KeyStatus
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.limits import ARRIVAL_POLL_S, LOAD_DEADLINE_S, SLOT_ALIGN_BYTES
from kvstore.core.plans import NOWHERE
from kvstore.engine_connector.session import Link, StoreSession
from kvstore.proto.kvstore_pb2 import FAILED, LOADED

_ORPHAN = "orphan"  # Reserve's reason for keys whose parent the store does not have (any more)

CopyBlock = Callable[[int, NDArray[np.uint8]], None]
"""Copies block `i` of the call between the engine's memory and `[block_nbytes] uint8` of the arena."""


class KeyedBlocks:
    """Any thread; calls of several threads go on beside each other. Whoever made `session` closes it."""

    def __init__(
        self,
        session: StoreSession,
        *,
        load_deadline_s: float = LOAD_DEADLINE_S,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session = session
        self._load_deadline_s = load_deadline_s
        self._clock = clock or MonotonicClock()
        self._sleep = sleep
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._num_calls = 0  # under way
        self._settled = 0  # number of the last link whose sidecar knows that calls before it have ended

    def count_held(self, namespace: bytes, keys: Sequence[bytes], *, further_group: bool = False) -> int:
        """How many of `keys`, from the first one on, `load` would find. What lies on drives begins to be read.
        `further_group`: of pages whose request is counted with those of another namespace; so in `load`."""
        with self._call() as link:
            wire_id = str(next(self._request_ids))
            match = self._session.ask(
                link,
                lambda client, _: client.match(namespace, keys, request_id=wire_id, further_group=further_group),
            )
            if match is None:
                return 0
            if any(match.tiers):  # not all in RAM
                self._session.ask(link, lambda client, _: client.prefetch(namespace, keys[: match.num_blocks]))
            return match.num_blocks

    def held_each(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the store has it here, whatever is before it. Of a further group, as above."""
        with self._call() as link:
            wire_id = str(next(self._request_ids))
            match = self._session.ask(
                link,
                lambda client, _: client.match(namespace, keys, request_id=wire_id, further_group=True, each=True),
            )
            return [False] * len(keys) if match is None else [tier != NOWHERE for tier in match.tiers]

    def load(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        block_nbytes: int,
        copy_in: CopyBlock,
        *,
        further_group: bool = False,
    ) -> int:
        """Copy blocks to where the engine wants them; how many, from the first one on, are there. What `copy_in` has written
        for the others, if anything, is not to be used."""
        with self._call() as link:
            started_s = self._clock.now_s()
            wire_id = str(next(self._request_ids))
            grant = self._session.ask(
                link, lambda client, _: client.acquire(wire_id, namespace, keys, further_group=further_group)
            )
            if link is None or grant is None or not grant.lease_id:
                return 0
            num_loaded = 0
            try:
                num_loaded = self._copy_in(link, grant, block_nbytes, copy_in, started_s)
            finally:
                outcome = LOADED if num_loaded == grant.num_blocks else FAILED
                seconds = self._clock.now_s() - started_s
                self._session.ask(
                    link,
                    lambda client, _: client.release(grant.lease_id, outcome, num_loaded=num_loaded, seconds=seconds),
                )
            return num_loaded

    def save(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        block_nbytes: int,
        copy_out: CopyBlock,
        *,
        parent: bytes = b"",
    ) -> int:
        """Store the blocks that the store lacks; how many, from the first one on, it has then, or will have when another
        engine has written them. `parent` is the key before keys[0], b"" for none. Keys whose parent the store has lost are
        stored as if they had none: an engine that still has the parent itself finds them."""
        with self._call() as link:
            grant = self._reserve(link, namespace, keys, parent)
            if grant is not None and grant.declined_reason == _ORPHAN:
                grant = self._reserve(link, namespace, keys, b"")
            if link is None or grant is None:
                return 0
            num_held = next((i for i, status in enumerate(grant.statuses) if status == KeyStatus.DECLINED), len(keys))
            if not grant.lease_id:
                return num_held
            granted = [i for i in range(num_held) if grant.statuses[i] == KeyStatus.GRANTED]
            num_written = num_ready = 0
            try:
                num_written = self._copy_out(link, grant, granted, block_nbytes, copy_out)
            finally:
                if num_written:
                    written = [keys[i] for i in granted[:num_written]]
                    num_ready = self._session.ask(link, lambda client, _: client.commit(grant.lease_id, written)) or 0
                if num_ready < len(granted):
                    self._session.ask(link, lambda client, _: client.abort(grant.lease_id))
            return num_held if num_ready == len(granted) else granted[0]

    def drop(self, namespace: bytes) -> int:
        """Forget all blocks of a namespace, for every engine; how many."""
        with self._call() as link:
            return self._session.ask(link, lambda client, _: client.drop(namespace)) or 0

    def _reserve(self, link: Link | None, namespace: bytes, keys: Sequence[bytes], parent: bytes) -> Reserved | None:
        wire_id = str(next(self._request_ids))
        return self._session.ask(link, lambda client, _: client.reserve(wire_id, namespace, keys, parent=parent))

    def _copy_in(self, link: Link, grant: Acquired, block_nbytes: int, copy_in: CopyBlock, started_s: float) -> int:
        arena = self._session.arena(link.boot_id)
        until_s = started_s + self._load_deadline_s
        extents = zip(grant.offsets.tolist(), grant.generations.tolist(), strict=True)
        for i, (offset, generation) in enumerate(extents):
            if arena is None or not self._wait_for(arena, offset, generation, until_s):
                return i
            copy_in(i, arena.array[offset : offset + block_nbytes])
            if _arrival(arena, offset, generation) is not Arrival.THERE:
                return i
        return len(grant.offsets)

    def _wait_for(self, arena: ClientArena, offset: int, generation: int, until_s: float) -> bool:
        """Whether the block is in its slot before the deadline. Waits as long as the sidecar that reads it lives."""
        pause_s, longest_s = ARRIVAL_POLL_S
        while True:
            lives = self._session.live_boot_id == arena.boot_id  # before the table: what it said last is seen
            arrival = _arrival(arena, offset, generation)
            if arrival is not Arrival.ON_ITS_WAY or not lives or self._clock.now_s() >= until_s:
                return arrival is Arrival.THERE
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _copy_out(
        self, link: Link, grant: Reserved, granted: Sequence[int], block_nbytes: int, copy_out: CopyBlock
    ) -> int:
        """How many of the granted blocks are written. A slot that is not ours any more is not touched."""
        arena = self._session.arena(link.boot_id)
        extents = zip(granted, grant.offsets.tolist(), grant.generations.tolist(), strict=True)
        for num_written, (i, offset, generation) in enumerate(extents):
            if arena is None or _arrival(arena, offset, generation) is not Arrival.THERE:
                return num_written
            copy_out(i, arena.array[offset : offset + block_nbytes])
        return len(granted)

    @contextmanager
    def _call(self) -> Iterator[Link | None]:
        """A call under way. After a reconnection the first one beside which no other goes on says that nobody here touches what
        was leased before, so that no slot stays in limbo. Others wait for that: what they are granted may expire as well."""
        with self._lock:
            link = self._session.link
            if link is not None and link.number > self._settled and not self._num_calls:
                self._settled = link.number
                if link.number > 1:
                    self._session.ask(link, lambda client, _: client.renew([], others_ended=True))
            self._num_calls += 1
        try:
            yield link
        finally:
            with self._lock:
                self._num_calls -= 1


def _arrival(arena: ClientArena, offset: int, generation: int) -> Arrival:
    return arrival_of(int(arena.generations[offset // SLOT_ALIGN_BYTES]), generation)
