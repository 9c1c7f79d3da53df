"""Small blocks on small drives, for the tests of the NVMe tier."""

import random
import threading
from collections.abc import Sequence

import numpy as np

from kvstore.core.keys import HashScheme, KVSpec
from kvstore.core.moves import BlockRecord, Forget, MoveDone, MoveProblem

PAGE = 4096
SEGMENT = 64 * PAGE


def spec(*, pages: int = 1, digest_nbytes: int = 16, weights: str = "w") -> KVSpec:
    """Blocks of `pages` pages less a few bytes, so that a slot has a tail."""
    algorithm = "xxh3_128" if digest_nbytes == 16 else "sha256"
    return KVSpec(
        weights=weights,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        dtype="float16",
        hash=HashScheme(algorithm=algorithm),
        page_format="opaque:test:cpu",
        stored_format="opaque:test:cpu",
        opaque_block_nbytes=pages * PAGE - 96,
    )


SPEC = spec()
NAMESPACE = SPEC.namespace("tenant")


def key(number: int, digest_nbytes: int = 16) -> bytes:
    return random.Random(number).randbytes(digest_nbytes)


def record(number: int, *, slot: int | None = None, parent: bytes = b"", generation: int | None = None) -> BlockRecord:
    """The `number`-th block of NAMESPACE in a slot of one page."""
    return BlockRecord(
        namespace=NAMESPACE,
        key=key(number),
        parent=parent,
        offset=(number if slot is None else slot) * PAGE,
        nbytes=SPEC.block_nbytes,
        generation=number + 1 if generation is None else generation,
        checksum=number * 0x9E3779B97F4A7C15 % 2**64,
        last_use=number,
        hits=number % 3,
    )


def forget(of: BlockRecord, problem: MoveProblem | None = None) -> Forget:
    return Forget(of.namespace, of.key, of.offset, of.nbytes, of.generation, problem)


class Ends:
    """Collects what a tier reports; waits with a deadline."""

    def __init__(self) -> None:
        self.done: dict[int, MoveDone] = {}
        self.forgotten: list[Forget] = []
        self._changed = threading.Condition()

    def moved(self, ends: Sequence[MoveDone]) -> None:
        with self._changed:
            for end in ends:
                assert end.move_id not in self.done, "a move ended twice"
                self.done[end.move_id] = end
            self._changed.notify_all()

    def forgot(self, forgets: Sequence[Forget]) -> None:
        with self._changed:
            self.forgotten += forgets
            self._changed.notify_all()

    def wait(self, *move_ids: int, deadline_s: float = 20.0) -> list[MoveDone]:
        with self._changed:
            found = self._changed.wait_for(lambda: all(i in self.done for i in move_ids), deadline_s)
        assert found, f"moves {set(move_ids) - self.done.keys()} did not end"
        return [self.done[i] for i in move_ids]

    def wait_forgotten(self, count: int, deadline_s: float = 20.0) -> list[Forget]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.forgotten) >= count, deadline_s), "removals did not end"
        return self.forgotten


def block_bytes(number: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)
