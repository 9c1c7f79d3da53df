"""Stats of a node that never was: two drives of which one is sick, peers, tenants, hours of traffic. For the dashboard's tests,
and to look at its page: python tests/busy_node.py [PORT]"""

import math
import random
import time

from kvstore.core.errors import PeerUnavailable
from kvstore.core.plans import FetchPlan, MatchWish
from kvstore.costs import LoadCost, PrefillCost, TierQuote
from kvstore.dashboard import Dashboard
from kvstore.inspection import HotPrefix
from kvstore.plan_log import PlanRecord, TierShare
from kvstore.proto import kvstore_pb2 as pb

_GIB = 1 << 30
_TENANTS = {"search": 0.45, "assistant": 0.33, "batch-eval": 0.14, "(none)": 0.06, "(other)": 0.02}
_MISSES = {"never_stored": 0.58, "evicted": 0.17, "too_slow": 0.1, "declined": 0.05, "failed": 0.02, "tail": 0.08}


class BusyNode:
    """A Source whose figures follow `now_s`, seconds since its start. `away`: the loop does not answer."""

    def __init__(self, now_s: float = 6 * 3600.0) -> None:
        self.now_s = now_s
        self.away = False
        self.well = False
        self._hits = {"hbm": 0.0, "pinned": 0.0, "nvme": 0.0, "peer": 0.0}
        self._requested = self._missed = self._evicted = 0.0
        self._at_s = 0.0
        self._random = random.Random(4)

    def stats(self) -> pb.StatsReply:
        if self.away:
            raise PeerUnavailable("the sidecar is too busy", peer="brain loop", deadline_s=5.0)
        self._advance()
        requested, hits = int(self._requested), {tier: int(tokens) for tier, tokens in self._hits.items()}
        missed = requested - sum(hits.values())
        misses = {reason: int(missed * share) for reason, share in _MISSES.items()}
        misses["never_stored"] += missed - sum(misses.values())
        usage = pb.Usage(
            num_requests=requested // 5200, requested_tokens=requested, hit_tokens=hits, missed_tokens=misses
        )
        fetched = hits["nvme"] + hits["peer"]
        drives = [
            pb.DriveStats(path="/mnt/nvme0/kv", state="ready", capacity_bytes=900 * _GIB),
            pb.DriveStats(path="/mnt/nvme1/kv", state="ready", capacity_bytes=900 * _GIB),
        ]
        problems = []
        if not self.well:
            drives[1] = pb.DriveStats(
                path="/mnt/nvme1/kv", state="degraded", reason="write: no space (EDQUOT)", capacity_bytes=900 * _GIB
            )
            problems = [
                pb.Problem(problem="disk_full", subject=drives[1].path, reason=f"degraded: {drives[1].reason}"),
                pb.Problem(problem="peer_suspect", subject="node-c", reason="3 fetches timed out; asked again in 8 s"),
            ]
        moved = {("nvme", "read"): hits["nvme"], ("nvme", "write"): missed * 0.6, ("peer", "read"): hits["peer"]}
        return pb.StatsReply(
            boot_id=bytes(range(16)),
            server_version="0.1.0",
            uptime_s=self.now_s,
            tiers=[_tier("pinned", 64, 0.93, 520_000), _tier("nvme", 1800, 0.71, 10_100_000, drives)],
            num_blocks=10_460_000,
            num_namespaces=7,
            num_sessions=24,
            num_leases=61,
            counters={
                "stored_blocks_total": missed // 16,
                "evicted_blocks_total": int(self._evicted),
                "acquired_blocks_total": fetched // 16,
                "promoted_blocks_total": hits["nvme"] // 16,
                "fetched_blocks_total": hits["peer"] // 16,
                "declined_blocks_no_space_total": 0,
            },
            seconds={
                "saved_prefill": sum(hits[tier] for tier in ("pinned", "nvme", "peer")) / 14_000,
                "predicted_fetch": fetched / 90_000,
                "actual_fetch": fetched / 84_000,
            },
            peers=[
                _peer("node-b", "ready", hits["peer"] * 80_000, 11.2e9, 0.0004),
                _peer("node-c", "ready" if self.well else "suspect", hits["peer"] * 41_000, 2.9e9, 0.0031),
                _peer("node-d", "ready", hits["peer"] * 10_000, 9.7e9, 0.0005),
            ],
            usage=usage,
            tenants=[_tenant(name, share, usage) for name, share in _TENANTS.items()],
            histograms=[
                pb.Histogram(name="transfer_bytes", labels=labels, sum=tokens * 131_072)
                for labels, tokens in moved.items()
            ],
            queues=[
                pb.QueueDepth(queue="nvme_reads", length=14, limit=4096),
                pb.QueueDepth(queue="nvme_writes", length=2210, limit=8192),
                pb.QueueDepth(queue="peer_fetches", length=3, limit=256),
            ],
            removals=[
                pb.Removals(tier="pinned", policy="s3fifo", reason="evicted", num_blocks=int(self._evicted)),
                pb.Removals(tier="nvme", policy="s3fifo", reason="evicted", num_blocks=int(self._evicted * 0.4)),
                pb.Removals(tier="pinned", reason="dropped", num_blocks=int(self.now_s / 3600) * 4000),
            ],
            write_budget=pb.WriteBudget(
                policy="write_through", bytes_per_day=20 << 40, written_bytes=missed * 78_000, day_bytes=9 << 40
            ),
            predictions=[
                pb.Prediction(kind="fetch", num=4312, num_close=4010, ratio=1.04),
                pb.Prediction(kind="prefill", num=9000, num_close=8800, ratio=0.99),
            ],
            problems=problems,
            capacity_curve=_capacity_curve(),
            loop_lag_s=0.0021,
            num_expired_leases=1,
            num_open_requests=18,
        )

    def plans(self, count: int) -> tuple[list[PlanRecord], float]:
        made = [_plan(i, self.now_s - 0.4 - 3.1 * i * (1 + i / 9), random.Random(i)) for i in range(count)]
        return made, self.now_s

    def hot_prefixes(self, count: int) -> list[HotPrefix]:
        rows = [(48, 91_204), (2_100, 1_310), (512, 4_020), (96, 15_533), (7_800, 61), (1_024, 402)]
        tenants = ("search", "assistant", "assistant", "search", "batch-eval", "")
        return [
            HotPrefix(
                namespace=bytes([17 * (i % 3) + 3] * 16),
                tenant=tenants[i],
                model="Llama-3.1-70B-Instruct" if i % 3 else "Qwen3-32B",
                label=("system prompt v7", "contracts 2026", "", "", "nightly eval", "")[i],
                key=random.Random(i).randbytes(16),
                num_blocks=blocks,
                block_tokens=16,
                hits=hits,
                ready_blocks={"pinned": blocks if i != 4 else 1200, "nvme": int(blocks * 0.8)},
            )
            for i, (blocks, hits) in enumerate(rows[:count])
        ]

    def _advance(self) -> None:
        while self._at_s < self.now_s:
            step_s = min(20.0, self.now_s - self._at_s)
            self._at_s += step_s
            day = 0.7 + 0.3 * math.sin(self._at_s / 2300.0) + 0.1 * math.sin(self._at_s / 47.0)
            tokens = 26_000 * day * step_s * self._random.uniform(0.85, 1.15)
            self._requested += tokens
            shares = {
                "hbm": 0.24 + 0.03 * math.sin(self._at_s / 90),
                "pinned": 0.33 + 0.06 * math.sin(self._at_s / 610),
                "nvme": 0.17 + 0.05 * math.sin(self._at_s / 290 + 1),
                "peer": 0.07 + 0.03 * math.sin(self._at_s / 170 + 2),
            }
            for tier, share in shares.items():
                self._hits[tier] += tokens * share * self._random.uniform(0.93, 1.07)
            self._evicted += tokens / 16 * 0.11 * (1 + math.sin(self._at_s / 130)) * self._random.uniform(0.5, 1.5)


def filled_dashboard(node: BusyNode, *, hours: float = 6.0, end_s: float | None = None) -> Dashboard:
    """A dashboard that has seen the last hours: one sample a minute, and one each 2 s at the end."""
    end_s = time.time() if end_s is None else end_s
    start_s, now = end_s - hours * 3600, [0.0]
    dashboard = Dashboard(node, wall_s=lambda: now[0] or time.time())
    times = [start_s + 60 * i for i in range(int(hours * 60) - 10)] + [end_s - 600 + 2 * i for i in range(300)]
    for at_s in times:
        now[0], node.now_s = at_s, 60 + at_s - start_s
        dashboard.sample()
    now[0] = 0.0
    return dashboard


def _tier(name: str, gib: int, used: float, blocks: int, drives: list[pb.DriveStats] | None = None) -> pb.TierStats:
    parts = {"ready": used, "writing": 0.025, "leaving": 0.004, "limbo": 0.006, "quarantined": 0.003 if drives else 0.0}
    nbytes = {f"{state}_bytes": int(gib * _GIB * share) for state, share in parts.items()}
    free = gib * _GIB - sum(nbytes.values())
    return pb.TierStats(
        name=name, capacity_bytes=gib * _GIB, free_bytes=free, ready_blocks=blocks, drives=drives or (), **nbytes
    )


def _capacity_curve() -> pb.CapacityCurve:
    """64 GiB where 300 would do."""

    def rate(size: float) -> float:
        return 0.24 + 0.47 * (1 - math.exp(-size / 110 / _GIB))

    named = {"0.5x": 32, "1x": 64, "2x": 128, "4x": 256, "8x": 512, "drives": 1800}
    sizes = [2.0 ** (step / 2) * _GIB for step in range(25)]
    return pb.CapacityCurve(
        requested_tokens=4.1e8,
        followed_part=0.0004,
        followed_blocks=4012,
        memory_bytes=660_000,
        capacities=[
            *(
                pb.CapacityHits(capacity=name, bytes=gib * _GIB, hit_rate=rate(gib * _GIB))
                for name, gib in named.items()
            ),
            pb.CapacityHits(capacity="endless", hit_rate=0.734),
        ],
        bytes=sizes,
        hit_rates=[rate(size) for size in sizes],
        words="Of the tokens asked for lately, twice the RAM would have hit 56 % instead of 45 %, the drives 71 %, "
        "and a day's blocks without end 73 %.",
    )


def _peer(name: str, state: str, fetched: float, speed: float, latency_s: float) -> pb.PeerStats:
    address = f"10.0.0.{ord(name[-1]) - 96}:7077"
    return pb.PeerStats(
        node_id=name,
        address=address,
        state=state,
        links=["rdma", "tcp"],
        fetched_bytes=int(fetched),
        queued_bytes=3 << 20,
        bytes_per_s=speed,
        latency_s=latency_s,
    )


def _tenant(name: str, share: float, usage: pb.Usage) -> pb.TenantUsage:
    hits = {tier: int(tokens * share) for tier, tokens in usage.hit_tokens.items()}
    misses = {reason: int(tokens * share) for reason, tokens in usage.missed_tokens.items()}
    own = pb.Usage(
        num_requests=int(usage.num_requests * share),
        requested_tokens=sum(hits.values()) + sum(misses.values()),
        hit_tokens=hits,
        missed_tokens=misses,
    )
    held = {"pinned": int(58 * _GIB * share), "nvme": int(1300 * _GIB * share)}
    return pb.TenantUsage(tenant=name, usage=own, held_bytes=held)


def _plan(number: int, at_s: float, chance: random.Random) -> PlanRecord:
    found = chance.choice([96, 420, 1210, 2050, 0, 730])
    tokens = 16 * found + chance.randrange(60, 4000)
    outcome = chance.choice(["loaded", "loaded", "loaded", "partly", "fetching", "failed"]) if found else "recompute"
    recompute_s = tokens / 14_000
    fetch_s = found * 131_072 / 6.8e9 + 0.004
    both = found > 1000
    fetch = FetchPlan(
        num_blocks=found,
        both_ends=both,
        front_blocks=found // 6 if both else 0,
        fetch_s=fetch_s,
        recompute_s=recompute_s,
        total_s=fetch_s + 0.04 if found else recompute_s,
        deadline_s=2 * fetch_s,
        reason=f"fetched in {fetch_s:.3f} s, {recompute_s:.3f} s computed" if found else "nothing is stored of it",
    )
    quote = TierQuote(LoadCost(0.0003, 6.8e9), 3.1e6)
    shares = (TierShare(0, found // 2, None), TierShare(1, found - found // 2, quote)) if found else ()
    loaded = {"loaded": found, "partly": found * 2 // 3}.get(outcome, 0)
    return PlanRecord(
        plan_id=number,
        instance=b"",
        namespace=b"",
        at_s=at_s,
        wish=MatchWish(f"chatcmpl-{chance.randrange(16**10):010x}", tokens),
        block_tokens=16,
        block_nbytes=131_072,
        num_found=found,
        tiers=shares,
        prefill=PrefillCost(0.0, 7e-5, 1e-9),
        plan=fetch,
        outcome=outcome,
        num_loaded=loaded,
        actual_s=fetch_s * chance.uniform(0.9, 1.2) if loaded else 0.0,
    )


if __name__ == "__main__":
    import sys

    from kvstore.http_server import HttpServer

    node = BusyNode()
    began_s = time.time()
    dashboard = filled_dashboard(node)
    first_s = node.now_s
    server = HttpServer("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 9178, node.stats, dashboard)
    server.start()
    print(f"http://127.0.0.1:{server.port}/", flush=True)
    while True:
        time.sleep(2.0)
        node.now_s = first_s + time.time() - began_s
        dashboard.sample()
