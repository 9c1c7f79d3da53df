"""Engines that put and get without end, in threads, and look at every byte that they are given."""

import contextlib
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from block_client import content

from kvstore.client import Client
from kvstore.client_arena import Arrival, arrival_of
from kvstore.core.blocks import KeyStatus
from kvstore.core.errors import KVStoreError, PeerUnavailable, UnknownLease
from kvstore.core.keys import KVSpec
from kvstore.proto import kvstore_pb2 as pb

_ARRIVAL_DEADLINE_S = 20.0  # for a block to come from the drive of a busy machine
_ARRIVAL_POLL_S = 0.0003
_CONNECT_POLL_S = 0.003
_JOIN_DEADLINE_S = 30.0
_LONGEST_CALL_S = 10.0


class LoadClient:
    """One engine's connection. Blocks are `content` of their keys; `chains` are prefixes of one spec."""

    def __init__(self, socket: Path, spec: KVSpec, chains: Sequence[list[bytes]]) -> None:
        self.spec = spec
        self.chains = chains
        self.namespace = spec.namespace()
        self.tally: Counter[str] = Counter()  # blocks: stored, right, lost, wrong; calls refused, by code
        self.wrong: list[str] = []  # in words
        self.client = Client(
            str(socket),
            instance=uuid.uuid4().bytes,
            role=pb.BOTH,
            specs=[spec],
            connect_deadline_s=_LONGEST_CALL_S,
            call_deadline_s=_LONGEST_CALL_S,
        )

    def put(self, keys: Sequence[bytes]) -> int:
        """How many blocks became READY."""
        client = self.client
        grant = client.reserve(uuid.uuid4().hex, self.namespace, keys)
        if not grant.lease_id:
            return 0
        assert client.arena is not None
        granted = [key for key, status in zip(keys, grant.statuses, strict=True) if status == KeyStatus.GRANTED]
        nbytes = self.spec.block_nbytes
        for key, offset in zip(granted, grant.offsets.tolist(), strict=True):
            client.arena.array[offset : offset + nbytes] = content(key, nbytes)
        num_stored = client.commit(grant.lease_id)
        self.tally["stored"] += num_stored
        return num_stored

    def get(self, keys: Sequence[bytes]) -> Counter[str]:
        """Read what can be had, as it arrives: blocks right, lost (a miss), and wrong without a sign."""
        grant = self.client.acquire(uuid.uuid4().hex, self.namespace, keys)
        slots = zip(grant.offsets.tolist(), grant.generations.tolist(), strict=True)
        found = Counter(self._read(key, *slot) for key, slot in zip(keys, slots, strict=False))
        self.tally += found
        if grant.lease_id:
            with contextlib.suppress(UnknownLease):  # it ended with the last of its blocks, if all were lost
                self.client.release(grant.lease_id, pb.LOADED)
        return found

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Length of the prefix that is held."""
        return self.client.match(self.namespace, keys).num_blocks

    def _read(self, key: bytes, offset: int, generation: int) -> str:
        if self._wait(offset, generation) is not Arrival.THERE:
            return "lost"
        assert self.client.arena is not None
        block = self.client.arena.array[offset : offset + self.spec.block_nbytes].copy()
        if self._arrival(offset, generation) is not Arrival.THERE:
            return "lost"
        if (block == content(key, block.nbytes)).all():
            return "right"
        self.wrong.append(f"{key.hex()}: {block[:32].tobytes().hex()}... at {offset} generation {generation}")
        return "wrong"

    def _wait(self, offset: int, generation: int) -> Arrival:
        until_s = time.monotonic() + _ARRIVAL_DEADLINE_S
        while (found := self._arrival(offset, generation)) is Arrival.ON_ITS_WAY:
            if not self.client.alive:
                return Arrival.LOST
            assert time.monotonic() < until_s, "neither there nor given up"
            time.sleep(_ARRIVAL_POLL_S)
        return found

    def _arrival(self, offset: int, generation: int) -> Arrival:
        assert self.client.arena is not None
        return arrival_of(int(self.client.arena.generations[offset // 4096]), generation)


class Load:
    """A LoadClient kept busy by a thread, from `start` until `stop` or until its sidecar is gone. It may be started before
    there is a sidecar, and again."""

    def __init__(self, engine: LoadClient, seed: int) -> None:
        self.engine = engine
        self.num_calls = 0
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, *, reads_only: bool = False) -> None:
        assert self._thread is None
        self.num_calls = 0
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(reads_only,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent. Raises what went wrong in the thread, which losing the sidecar is not."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_DEADLINE_S)
            assert not self._thread.is_alive(), "a call has outlived its deadline"
        self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, reads_only: bool) -> None:
        try:
            if self._connect():
                while not self._stop.is_set():
                    self._call(reads_only)
                    self.num_calls += 1
        except PeerUnavailable:
            self.engine.tally["sidecar lost"] += 1
        except BaseException as err:  # noqa: BLE001 - carried over to `stop`, and raised there
            self._error = err

    def _connect(self) -> bool:
        while not self._stop.is_set():
            try:
                self.engine.client.connect()
            except PeerUnavailable:
                time.sleep(_CONNECT_POLL_S)
            else:
                return True
        return False

    def _call(self, reads_only: bool) -> None:
        engine, rng = self.engine, self._rng
        chain = engine.chains[min(int(rng.expovariate(4 / len(engine.chains))), len(engine.chains) - 1)]
        keys = chain[: rng.randint(1, len(chain))]
        kind = rng.random()
        try:
            if kind < 0.5 and not reads_only:
                engine.put(keys)
            elif kind < 0.55 and not reads_only:
                engine.client.drop(engine.namespace, keys[-1:])
            elif kind < 0.65:
                engine.client.prefetch(engine.namespace, keys)
            else:
                engine.get(keys)
        except PeerUnavailable:
            raise
        except KVStoreError as err:
            engine.tally[err.code] += 1
