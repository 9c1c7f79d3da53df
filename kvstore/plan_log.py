"""What was planned, why, and what became of it: a ring of the last plans, for Explain."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.limits import LOAD_SETTLE_S, MAX_REMEMBERED_PLANS
from kvstore.core.plans import TIERS, FetchPlan, MatchWish
from kvstore.costs import PrefillCost, TierQuote

_PINNED = TIERS.index("pinned")


class TierShare(NamedTuple):
    """What a plan knew of one tier."""

    tier: int  # TIERS
    num_blocks: int  # found there, behind what the engine has
    quote: TierQuote | None  # None: it does not answer; RAM needs none


@dataclass(slots=True, kw_only=True)
class PlanRecord:
    """One plan. `outcome` goes planned -> fetching -> loaded | partly | failed | cancelled | unknown, or stays recompute."""

    plan_id: int
    instance: bytes
    namespace: bytes
    at_s: float
    wish: MatchWish
    block_tokens: int
    block_nbytes: int
    num_found: int
    tiers: tuple[TierShare, ...]
    prefill: PrefillCost | None
    plan: FetchPlan
    last_key: bytes = b""  # of the last block that was found
    outcome: str = "planned"
    num_loaded: int = 0
    actual_s: float = 0.0

    @property
    def saved_s(self) -> float:
        """Seconds of prefill that what was loaded saved the engine, as the model had it. Loads from the back are the dear end."""
        if self.prefill is None or not self.num_loaded:
            return 0.0
        context, step = self.wish.first_needed * self.block_tokens, self.block_tokens
        first = self.plan.num_blocks - self.num_loaded if self.plan.both_ends else 0
        return self.prefill.work_s(context + (first + self.num_loaded) * step) - self.prefill.work_s(
            context + first * step
        )

    def words(self) -> str:
        """All of it in a few sentences."""
        return " ".join([self._found(), self._chosen(), self._became()])

    def _found(self) -> str:
        if not self.num_found:
            return f"{self.wish.num_tokens:,} tokens, nothing found behind block {self.wish.first_needed}."
        shares = [f"{share.num_blocks} in {TIERS[share.tier]}{_speed(share)}" for share in self.tiers]
        nbytes = self.num_found * self.block_nbytes
        behind = f" behind the {self.wish.first_needed} it has" if self.wish.first_needed else ""
        return (
            f"{self.wish.num_tokens:,} tokens; {self.num_found} blocks ({nbytes / 1e6:,.1f} MB) found{behind}: "
            f"{', '.join(shares)}."
        )

    def _chosen(self) -> str:
        plan = self.plan
        if not plan.num_blocks:
            return f"Compute all: {plan.reason}."
        front = (
            f"computing at most {plan.front_blocks} at the front meanwhile"
            if plan.front_blocks
            else "computing if it is late"
        )
        ends = f" from the back, {front}" if plan.both_ends else ""
        return f"Fetch {plan.num_blocks} blocks{ends}: {plan.reason}."

    def _became(self) -> str:
        match self.outcome:
            case "planned":
                return "Not taken up so far."
            case "recompute":
                return "The engine computed."
            case "fetching":
                return "On its way."
            case "unknown":
                return "The engine never told how that ended."
        rest = self.plan.num_blocks - self.num_loaded
        who = "the engine computed the other" if rest else "none was left to the engine:"
        return f"{self.outcome.capitalize()}: {self.num_loaded} blocks in {self.actual_s:.3f} s, {who} {rest}."


class PlanLog:
    """The last MAX_REMEMBERED_PLANS plans, by number, by lease while they are carried out, and newest first."""

    def __init__(self, *, max_plans: int = MAX_REMEMBERED_PLANS) -> None:
        self._ring: deque[PlanRecord] = deque()
        self._max_plans = max_plans
        self._by_id: dict[int, PlanRecord] = {}
        self._by_lease: dict[int, PlanRecord] = {}
        self._lease_of: dict[int, int] = {}  # by plan

    def add(self, record: PlanRecord) -> None:
        """The oldest is forgotten when there are too many."""
        if len(self._ring) == self._max_plans:
            oldest = self._ring.popleft()
            del self._by_id[oldest.plan_id]
            self._by_lease.pop(self._lease_of.pop(oldest.plan_id, 0), None)
        self._ring.append(record)
        self._by_id[record.plan_id] = record

    def granted(self, plan_id: int, instance: bytes, lease_id: int) -> None:
        """An engine carries its plan out. Unknown (forgotten, or somebody else's) plans are nothing."""
        record = self._by_id.get(plan_id)
        if record is None or record.instance != instance:
            return
        record.outcome = "fetching" if lease_id else "failed"
        self._by_lease.pop(self._lease_of.pop(plan_id, 0), None)  # carried out twice: the last time counts
        if lease_id:
            self._by_lease[lease_id] = record
            self._lease_of[plan_id] = lease_id

    def released(
        self, instance: bytes, lease_id: int, outcome: str, num_loaded: int, seconds: float
    ) -> PlanRecord | None:
        """The plan that this instance's lease carried out, with what became of it."""
        record = self._by_lease.get(lease_id)
        if record is None or record.instance != instance:
            return None
        del self._by_lease[lease_id], self._lease_of[record.plan_id]
        record.outcome, record.actual_s = outcome, seconds
        record.num_loaded = min(num_loaded, record.plan.num_blocks)
        return record

    def check(self) -> None:
        """Assert that leases are of plans that are remembered, one each."""
        assert len(self._ring) == len(self._by_id) <= self._max_plans
        assert self._lease_of == {record.plan_id: lease_id for lease_id, record in self._by_lease.items()}
        assert self._lease_of.keys() <= self._by_id.keys()

    def settle_old(self, now_s: float) -> None:
        """Loads whose end was never told: their engine died, or their lease expired."""
        while self._by_lease:
            lease_id, record = next(iter(self._by_lease.items()))
            if record.at_s + LOAD_SETTLE_S > now_s:
                return
            del self._by_lease[lease_id], self._lease_of[record.plan_id]
            record.outcome = "unknown"

    def newest(self, request_id: str, namespaces: Collection[bytes] | None) -> Iterator[PlanRecord]:
        """Newest first: of one request or of all ("") in these namespaces, or in all (None)."""
        for record in reversed(self._ring):
            if request_id in {"", record.wish.request_id} and (namespaces is None or record.namespace in namespaces):
                yield record


def _speed(share: TierShare) -> str:
    if share.quote is None:
        return "" if share.tier == _PINNED else " (does not answer)"
    load = share.quote.load
    queued = f", {share.quote.queued_bytes / 1e6:,.1f} MB ahead" if share.quote.queued_bytes else ""
    return f" ({load.bytes_per_s / 1e9:.3g} GB/s, {load.latency_s * 1e3:.1f} ms{queued})"
