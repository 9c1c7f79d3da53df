"""A scheduler side over the real store, with what its engine and its worker would do."""

from dataclasses import dataclass, field
from typing import NamedTuple

from in_process_sidecar import SEGMENT_BYTES, InProcessClient, InProcessSidecar

from kvstore.client import Prefetched
from kvstore.core.keys import KVSpec, unpack_keys
from kvstore.core.plans import TIERS, Match, MatchWish
from kvstore.engine_connector.protocol import (
    CacheOptions,
    ConnectorMetadata,
    HandOver,
    LoadJob,
    SaveJob,
    ScheduledRequest,
    WorkerOutput,
)
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
BLOCK = SPEC.block_tokens
SLOTS_PER_SEGMENT = SEGMENT_BYTES // SPEC.block_nbytes


@dataclass
class Request:
    """As the engine's, of `num_blocks` full blocks and `extra` tokens; equal `family` means equal tokens."""

    request_id: str
    num_blocks: int
    extra: int = 1
    family: int = 0
    num_generated: int = 0
    traceparent: str = ""
    cache: CacheOptions = field(default_factory=CacheOptions)
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = SPEC.hash.hash_blocks([self.family] * (self.num_blocks * BLOCK))

    @property
    def tail_hash(self) -> bytes:
        parent = self.block_hashes[self.num_blocks - 1] if self.num_blocks else None
        return SPEC.hash.tail_hash([self.family] * self.extra, parent=parent) if self.extra else b""

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_blocks * BLOCK + self.extra

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated


class Wish(NamedTuple):
    """A Prefetch as it was asked for."""

    keys: list[bytes]
    first_needed: int


class Client(InProcessClient):
    """The blocks of `on_drive` lie on a drive, says the store."""

    def __init__(self, sidecar: InProcessSidecar, instance: bytes) -> None:
        super().__init__(sidecar, SPEC, instance=instance)
        self.on_drive: set[bytes] = set()
        self.wishes: list[Wish] = []

    def match(self, namespace: bytes, keys: list[bytes], wish: MatchWish | None = None, **named: str) -> Match:
        match = super().match(namespace, keys, wish, **named)
        tiers = [TIERS.index("nvme" if key in self.on_drive else "pinned") for key in keys[: match.num_blocks]]
        return match._replace(tiers=bytes(tiers))

    def prefetch(self, namespace: bytes, keys: list[bytes] | bytes, *, first_needed: int = 0) -> Prefetched:
        unpacked = unpack_keys(keys, SPEC.hash.digest_nbytes) if isinstance(keys, bytes) else keys
        return self._call("prefetch", lambda _store, _now_s: self._prefetch(namespace, unpacked, first_needed))

    def _prefetch(self, namespace: bytes, keys: list[bytes], first_needed: int) -> Prefetched:
        assert namespace == SPEC.namespace()
        self.wishes.append(Wish(keys, first_needed))
        return Prefetched(len(keys), len(self.on_drive.intersection(keys)))


class Side:
    """A scheduler side of one engine, with what its engine and worker would do."""

    def __init__(self, sidecar: InProcessSidecar, name: bytes, *, hand_over: HandOver | None = None) -> None:
        self.sidecar = sidecar
        self.client = Client(sidecar, name.ljust(16))
        self.session = StoreSession(self.client)
        self.reconnect()
        self.side = StoreSchedulerSide(self.session, block_tokens=BLOCK, clock=sidecar.clock, hand_over=hand_over)

    def reconnect(self) -> None:
        """What the session's background thread does."""
        self.session._try_connect()

    def match(self, request: Request, num_computed: int = 0) -> int:
        """In blocks."""
        tokens = self.side.get_num_new_matched_tokens(request, num_computed * BLOCK)
        assert tokens % BLOCK == 0
        return tokens // BLOCK

    def load(self, request: Request, num_blocks: int) -> LoadJob:
        """Allocate page i for block i, accept the load, send it to the worker."""
        self.side.update_state_after_alloc(request, pages(request), num_blocks * BLOCK)
        (job,) = self.step().loads
        self.side.check()
        return job

    def fill(self, request: Request, first: int, last: int) -> tuple[SaveJob, ...]:
        """A step that computes blocks [first, last)."""
        share = ScheduledRequest(request, pages(request), first * BLOCK, (last - first) * BLOCK)
        return self.step(share).saves

    def step(self, *scheduled: ScheduledRequest, preempted: frozenset[str] = frozenset()) -> ConnectorMetadata:
        meta = self.side.build_connector_meta(scheduled, preempted)
        self.side.check()
        return meta

    def report_saved(self, *jobs: SaveJob, written: bool = True) -> None:
        self.report(finished_saving=tuple((job.job_id, (written,) * len(job.moves)) for job in jobs))

    def report_loaded(self, job: LoadJob, *, failed: int = 0) -> None:
        """`failed` counts pages from the end of what was leased; lost ones fail in any case."""
        moved = [move.block_id for move in job.moves]
        bad = moved[len(moved) - failed :] + list(job.lost_block_ids)
        self.report(finished_loading=frozenset({job.request_id}), failed_block_ids=frozenset(bad))

    def report(self, **news: object) -> None:
        self.side.update_connector_output(WorkerOutput(**news))
        self.side.check()

    def store(self, request: Request) -> None:
        """Prefill and save all of it."""
        self.report_saved(*self.fill(request, 0, request.num_blocks))
        assert not self.side.request_finished(request)


def pages(request: Request) -> list[int]:
    return [100 + i for i in range(request.num_blocks + 1)]
