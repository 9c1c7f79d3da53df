"""What to fetch and what to compute, request by request, from what engines and tiers were measured to do.

Report  ---> prefill and copy speed, per engine        Match + wish ---> plan() ---> FetchPlan, remembered
drives  ---> TierSpeed (spill.py)            quotes --------^            Acquire, Release ---> what became of it
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import groupby
from typing import NamedTuple

from kvstore.calibration import CopySpeed, PredictionLog, PrefillEstimator
from kvstore.core.limits import MAX_MEASURED_ENGINES
from kvstore.core.plans import FetchPlan, Match, MatchWish
from kvstore.costs import TierQuote, block_value
from kvstore.plan_log import PlanLog, PlanRecord, TierShare
from kvstore.planner import PlanWish, plan


class PrefillSample(NamedTuple):
    """One step of an engine: over its shares of n tokens behind s, the sums of n and of n*s + n*n/2."""

    num_tokens: float
    num_pairs: float
    seconds: float


class _Engine:
    """What one engine was measured to do."""

    def __init__(self) -> None:
        self.prefill = PrefillEstimator()
        self.copy = CopySpeed()


class Advisor:
    """Plans, and keeps account of plans. Loop thread only; time comes in."""

    def __init__(self) -> None:
        self._engines: OrderedDict[tuple[bytes, bytes], _Engine] = OrderedDict()  # by namespace and instance
        self._latest: dict[
            bytes, _Engine
        ] = {}  # by namespace: who reported last; what another engine of it begins with
        self._log = PlanLog()
        self._num_plans = 0
        self._saved_s = 0.0
        self.fetches = PredictionLog()
        self.steps = PredictionLog()

    @property
    def seconds(self) -> dict[str, float]:
        """Sums since start; SECONDS says what each is."""
        return {
            "predicted_fetch": self.fetches.predicted_s,
            "actual_fetch": self.fetches.actual_s,
            "predicted_prefill": self.steps.predicted_s,
            "actual_prefill": self.steps.actual_s,
            "saved_prefill": self._saved_s,
        }

    def plan(  # noqa: PLR0917 - what a plan is made of
        self,
        instance: bytes,
        namespace: bytes,
        block_tokens: int,
        block_nbytes: int,
        wish: MatchWish,
        match: Match,
        quotes: Mapping[int, TierQuote | None],
        now_s: float,
        *,
        last_key: bytes = b"",
    ) -> tuple[int, FetchPlan]:
        """The plan's number, and what to do with the blocks behind `wish.first_needed`. `quotes` by tier number; RAM needs
        none: its speed is the engine's own copying. `last_key`: of the last block that was found."""
        engine = self._engine(namespace, instance)
        prefill = engine.prefill.cost
        tiers = match.tiers[wish.first_needed :]
        chosen = plan(
            PlanWish(
                num_tokens=wish.num_tokens,
                context_tokens=wish.first_needed * block_tokens,
                block_tokens=block_tokens,
                block_nbytes=block_nbytes,
                chunk_tokens=wish.chunk_tokens,
                compute_wait_s=wish.compute_wait_s,
                compute_price=wish.compute_price,
                both_ends=wish.both_ends,
                deadline_s=wish.deadline_s,
            ),
            tiers,
            quotes,
            engine.copy.cost,
            prefill,
        )
        self._num_plans += 1
        self._log.settle_old(now_s)
        self._log.add(
            PlanRecord(
                plan_id=self._num_plans,
                instance=instance,
                namespace=namespace,
                at_s=now_s,
                wish=wish,
                block_tokens=block_tokens,
                block_nbytes=block_nbytes,
                num_found=len(tiers),
                tiers=_shares(tiers, quotes),
                prefill=prefill,
                plan=chosen,
                last_key=last_key,
                outcome="planned" if chosen.num_blocks else "recompute",
            )
        )
        return self._num_plans, chosen

    def granted(self, plan_id: int, instance: bytes, lease_id: int) -> None:
        """An engine carries out its plan; lease 0: there was nothing left to lease."""
        self._log.granted(plan_id, instance, lease_id)

    def released(self, instance: bytes, lease_id: int, outcome: str, num_loaded: int, seconds: float) -> None:
        """An instance says that a lease has ended; it need not be one of a plan, nor its own."""
        record = self._log.released(instance, lease_id, outcome, num_loaded, seconds)
        if record is None:
            return
        self._saved_s += record.saved_s
        if outcome == "loaded" and num_loaded == record.plan.num_blocks:  # what was forecast is what was done
            self.fetches.observe(record.plan.fetch_s, seconds)

    def report(
        self, instance: bytes, namespace: bytes, prefill: Iterable[PrefillSample], copy_nbytes: int, copy_s: float
    ) -> None:
        """What an engine measured."""
        engine = self._engine(namespace, instance)
        self._latest[namespace] = engine
        believed = engine.prefill.cost
        for sample in prefill:
            if believed is not None and sample.num_tokens >= PrefillEstimator.MIN_STEP_TOKENS:
                predicted_s = believed.t0_s + believed.a_s * sample.num_tokens + believed.b_s * sample.num_pairs
                self.steps.observe(predicted_s, sample.seconds)
            engine.prefill.observe(*sample)
        if copy_nbytes and copy_s > 0:
            engine.copy.observe(copy_nbytes, copy_s)

    def block_value(
        self, namespace: bytes, position_tokens: int, block_tokens: int, nbytes: int, reuse_probability: float = 1.0
    ) -> float | None:
        """What a byte of a block is worth keeping: seconds of prefill that it may be expected to save, by what engines of the
        namespace were measured to need. For eviction and admission. None: nobody has reported yet."""
        engine = self._latest.get(namespace)
        prefill = None if engine is None else engine.prefill.cost
        if prefill is None:
            return None
        return block_value(prefill, position_tokens, block_tokens, nbytes, reuse_probability)

    def settle_old(self, now_s: float) -> None:
        """See PlanLog."""
        self._log.settle_old(now_s)

    def records(self, request_id: str, namespaces: Collection[bytes] | None) -> Iterator[PlanRecord]:
        """See PlanLog.newest."""
        return self._log.newest(request_id, namespaces)

    def check(self) -> None:
        """See PlanLog.check."""
        self._log.check()

    def _engine(self, namespace: bytes, instance: bytes) -> _Engine:
        key = namespace, instance
        engine = self._engines.get(key)
        if engine is None:
            engine = _Engine()
            if (like := self._latest.get(namespace)) is not None:
                engine = deepcopy(like)
            self._engines[key] = engine
            if len(self._engines) > MAX_MEASURED_ENGINES:
                (forgotten, _), old = self._engines.popitem(last=False)
                if self._latest.get(forgotten) is old:
                    del self._latest[forgotten]
        self._engines.move_to_end(key)
        return engine


SECONDS = {
    "predicted_fetch": "Seconds that complete fetches were predicted to take.",
    "actual_fetch": "Seconds that these fetches took.",
    "predicted_prefill": "Seconds that engines' steps were predicted to take.",
    "actual_prefill": "Seconds that these steps took.",
    "saved_prefill": "Seconds of prefill that fetched blocks saved the engines, as the cost model has it.",
}
"""Sums since start, with the sentence that metrics show."""


def _shares(tiers: bytes, quotes: Mapping[int, TierQuote | None]) -> tuple[TierShare, ...]:
    return tuple(TierShare(tier, len(list(run)), quotes.get(tier)) for tier, run in groupby(sorted(tiers)))
