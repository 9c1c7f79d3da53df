"""What do metrics cost: a scrape of a full store, and counting beside the work that is counted?

Scrape: a store with a million blocks of 50 tenants; the part that the brain loop does (the snapshot) and the part that the
scraping thread does (the text). Counting: the same requests against two dispatchers, one of which counts as always and one
whose counting is taken out; in turns. A request is Match with a wish, Acquire, Release, or Reserve and Commit with as much
evicted; with bytes copied as an engine copies them, and without, which no engine does.
"""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.harness import Report, Row, Samples, at_most, interleave, machine_card, millis, paired_ratio, show
from kvstore.core.blocks import Holder
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KVSpec
from kvstore.core.limits import SEGMENT_BYTES, SLOT_ALIGN_BYTES
from kvstore.dispatcher import Dispatcher
from kvstore.live_curve import LiveCurve
from kvstore.meters import Meters
from kvstore.metrics import StatsCollector
from kvstore.proto import kvstore_pb2 as pb
from kvstore.removed_keys import RemovedKeys
from kvstore.sessions import Peer, Session, Sessions
from kvstore.store import Store
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots, SharedGenerations
from kvstore.tiers.striped import StripedSlots
from kvstore.transport.frames import Verb
from kvstore.usage import Usage

QUESTION = "Cost of metrics: a scrape, and counting"
GOAL_SCRAPE_MS, GOAL_COUNTING = 20.0, 0.01
NUM_TENANTS = 50
SEQUENCE_BLOCKS = 100
INSTANCE = b"the benchmark..."
SMALL = KVSpec(weights="small", num_layers=1, num_kv_heads=1, head_dim=128, dtype="bfloat16")  # 8 KiB a block
REAL = KVSpec(weights="real", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 2 MiB: 8B models
REQUEST_BLOCKS, ARENA_BYTES = 64, 3 * 64 * (2 << 20)


class House:
    """A dispatcher over a store without a drive's threads, and an engine's session."""

    def __init__(self, nbytes: int, spec: KVSpec, tenants: Sequence[str], *, counts: bool = True) -> None:
        generations = np.ones(nbytes // SLOT_ALIGN_BYTES, np.uint64)
        slots = SegmentedSlots(nbytes, generations=SharedGenerations(generations))
        slots.add_segments(nbytes // SEGMENT_BYTES)
        drive = SegmentedSlots(nbytes, segment_bytes=SEGMENT_BYTES, generations=CountedGenerations())
        self.store = Store(pinned=slots, nvme=StripedSlots([drive]))
        clock = MonotonicClock()
        loop = asyncio.new_event_loop()
        loop.close()  # nobody's process is watched
        sessions = Sessions(self.store, loop=loop, clock=clock)
        self.dispatcher = Dispatcher(
            store=self.store, sessions=sessions, arena=_Arena(nbytes), boot_id=bytes(16), clock=clock
        )
        self.spec = spec
        self.namespaces = [self.store.open_namespace(spec, tenant).namespace for tenant in tenants]
        self.tenants = tenants
        if not counts:
            self.dispatcher.usage, self.dispatcher.curve, self.store.meters = _NoUsage(), _NoCurve(), _NoMeters()
            self.store._removed = _NoMemory()  # noqa: SLF001 - what is measured is its absence
        self._ids = itertools.count(1)

    def session(self, number: int) -> Session:
        """An engine's, of a tenant."""
        return Session(
            session_id=1,
            holder=Holder(INSTANCE, 1),
            tenant=self.tenants[number],
            role=pb.BOTH,
            rank=0,
            namespaces=frozenset({self.namespaces[number]}),
            has_arena=True,
            has_slab=False,
            cuda_registered=False,
            peer=Peer(0, None, local=True, trusted=True, close=lambda _: None),
        )

    def put(self, session: Session, namespace: bytes, keys: bytes) -> pb.ReserveReply:
        """Reserve and commit."""
        reply: Any = self.dispatcher.call(
            session, Verb.RESERVE, pb.ReserveRequest(request_id=str(next(self._ids)), namespace=namespace, keys=keys)
        )
        self.dispatcher.call(session, Verb.COMMIT, pb.CommitRequest(lease_id=reply.lease_id))
        return reply  # type: ignore[no-any-return]

    def get(self, session: Session, namespace: bytes, keys: bytes, missing: bytes) -> pb.AcquireReply:
        """Match, Acquire and Release."""
        number, num_keys = next(self._ids), (len(keys) + len(missing)) // 16
        wish = pb.PlanWish(request_id=str(number), num_tokens=num_keys * 16 + 5)
        match: Any = self.dispatcher.call(
            session, Verb.MATCH, pb.MatchRequest(namespace=namespace, keys=keys + missing, wish=wish)
        )
        grant: Any = self.dispatcher.call(
            session,
            Verb.ACQUIRE,
            pb.AcquireRequest(
                request_id=str(number), namespace=namespace, keys=keys, plan_id=match.plan.plan_id, ttl_s=30.0
            ),
        )
        self.dispatcher.call(
            session,
            Verb.RELEASE,
            pb.ReleaseRequest(lease_id=grant.lease_id, outcome=pb.LOADED, num_loaded=len(keys) // 16, seconds=0.01),
        )
        return grant  # type: ignore[no-any-return]


def run(*, num_blocks: int = 1_000_000, rounds: int = 40, requests: int = 8) -> Report:
    snapshot, text, nbytes = scrape(num_blocks)
    counting = {
        name: _count(copies=copies, rounds=rounds, requests=requests)
        for name, copies in (("blocks of 2 MiB copied", True), ("calls alone", False))
    }
    rows = [_row("snapshot, on the loop", snapshot), _row("text, off the loop", text)]
    for name, (with_it, without) in counting.items():
        rows.append(_row(f"{name}: counted", with_it, paired_ratio(with_it, without)))
        rows.append(_row(f"{name}: not counted", without, 1.0))
    alone, (copied, _) = counting["calls alone"], counting["blocks of 2 MiB copied"]
    each_s = statistics.median(a - b for a, b in zip(alone[0].seconds, alone[1].seconds, strict=True)) / requests
    share = each_s / (copied.median_s / requests)
    return Report(
        question=QUESTION,
        command="python -m benchmarks.metrics_cost",
        rows=rows,
        goals=[
            at_most("milliseconds for a scrape, both parts", millis(snapshot.median_s + text.median_s), GOAL_SCRAPE_MS),
            at_most("share of the throughput of puts and gets", share, GOAL_COUNTING),
        ],
        remarks=[
            f"{num_blocks:,} blocks of {NUM_TENANTS} tenants, {nbytes:,} bytes of text",
            f"a run: {requests} puts of {REQUEST_BLOCKS} blocks, as many evicted, and gets of them with half as many not held",
            f"counting costs {each_s * 1e6:.0f} us for a put and a get; the share is of what these take with their bytes",
        ],
    )


def _row(what: str, samples: Samples, ratio: float | None = None) -> Row:
    return {
        "what": what,
        "n": len(samples),
        "p50_ms": millis(samples.median_s),
        "p99_ms": millis(samples.p99_s),
        "ratio": "" if ratio is None else round(ratio, 4),
    }


def scrape(num_blocks: int, *, rounds: int = 15) -> tuple[Samples, Samples, int]:
    """Of a store with so many blocks: the loop's part, the thread's part, and bytes of text."""
    tenants = [f"tenant-{i}" for i in range(NUM_TENANTS)]
    nbytes = (num_blocks * SMALL.block_nbytes // SEGMENT_BYTES + 1) * SEGMENT_BYTES
    house = House(nbytes, SMALL, tenants)
    random = np.random.default_rng(1)
    per_tenant = num_blocks // NUM_TENANTS
    for number, namespace in enumerate(house.namespaces):
        session, batch = house.session(number), 16 * SEQUENCE_BLOCKS
        packed = random.bytes(16 * per_tenant)
        for start in range(0, len(packed), batch):
            house.put(session, namespace, packed[start : start + batch])
        for start in range(0, min(4 * batch, len(packed)), batch):
            house.get(session, namespace, packed[start : start + batch], random.bytes(160))
    stats = house.dispatcher.stats()
    assert stats.num_blocks == per_tenant * NUM_TENANTS
    assert len(stats.tenants) == NUM_TENANTS
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: stats))
    samples = interleave({"snapshot": house.dispatcher.stats, "text": lambda: generate_latest(registry)}, rounds=rounds)
    return samples["snapshot"], samples["text"], len(generate_latest(registry))


def _count(*, copies: bool, rounds: int, requests: int) -> tuple[Samples, Samples]:
    """Puts and gets, counted and not."""
    arena, pages = np.ones(ARENA_BYTES, np.uint8), np.ones(REQUEST_BLOCKS * REAL.block_nbytes, np.uint8)
    cases: Mapping[str, Callable[[], object]] = {
        name: _requests(House(ARENA_BYTES, REAL, [""], counts=counts), arena, pages, requests, copies=copies)
        for name, counts in (("counted", True), ("not", False))
    }
    samples = interleave(cases, rounds=rounds if copies else 5 * rounds)
    return samples["counted"], samples["not"]


def _requests(house: House, arena: Any, pages: Any, num_requests: int, *, copies: bool) -> Callable[[], object]:
    """New prompts: put, got."""
    random, session, (namespace,) = np.random.default_rng(2), house.session(0), house.namespaces
    nbytes = REAL.block_nbytes

    def serve() -> None:
        for _ in range(num_requests):
            keys, missing = random.bytes(16 * REQUEST_BLOCKS), random.bytes(8 * REQUEST_BLOCKS)
            put = house.put(session, namespace, keys)
            got = house.get(session, namespace, keys, missing)
            if copies:
                for i, offset in enumerate(np.frombuffer(put.offsets, "<u8").tolist()):
                    arena[offset : offset + nbytes] = pages[i * nbytes : (i + 1) * nbytes]
                for i, offset in enumerate(np.frombuffer(got.offsets, "<u8").tolist()):
                    pages[i * nbytes : (i + 1) * nbytes] = arena[offset : offset + nbytes]

    return serve


class _Arena:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.segment_bytes = self.faulted_nbytes = nbytes


class _NoCurve(LiveCurve):
    def stored(self, *_: Any) -> None: ...


class _NoUsage(Usage):
    def matched(self, *_: Any) -> bool:
        return False  # so that the curve is not told either

    def acquired(self, *_: Any) -> None: ...
    def released(self, *_: Any) -> int:
        return 0


class _NoMeters(Meters):
    def rpc(self, *_: Any) -> None: ...
    def transfer(self, *_: Any) -> None: ...


class _NoMemory(RemovedKeys):
    def add(self, *_: Any) -> None: ...
    def count(self, *_: Any) -> dict[str, int]:
        return {}


@click.command()
@click.option("--num-blocks", default=1_000_000, show_default=True)
@click.option("--rounds", default=40, show_default=True)
@click.option("--requests", default=8, show_default=True, help="In one run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, num_blocks: int, rounds: int, requests: int, as_json: bool) -> None:
    show(run(num_blocks=num_blocks, rounds=rounds, requests=requests), machine_card(), as_json=as_json)


if __name__ == "__main__":
    main()
