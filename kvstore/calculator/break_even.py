"""The answers: what a cached prefix of some length costs to fetch from each tier, to compute, or to do from both ends."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore import costs
from kvstore.calculator.fit import FittedPrefill, band
from kvstore.calculator.priors import scaled
from kvstore.calculator.tier import Tier

_WORTH_OVERLAPPING = 0.9
"""Both ends at once are worth their trouble when they take less than this part of the better of the two."""

MONTH_S = 730 * 3600.0


class Storage(NamedTuple):
    """What keeping bytes costs."""

    name: str
    usd_per_byte_s: float


DEFAULT_STORAGE = (
    Storage("dram", 2.46 / 2**30 / MONTH_S),
    Storage("block-volume", 0.08 / 1e9 / MONTH_S),
    Storage("object-store", 0.023 / 1e9 / MONTH_S),
)
"""Cloud list prices: $2.46 a GiB-month of DRAM, $0.08 and $0.023 a GB-month of block volume and object store."""


class TierAnswer(NamedTuple):
    """Of one tier. The last token is computed in any case; that is in none of these."""

    tier: Tier
    fetch_s: float
    compute_s: float  # of the same tokens, without t0
    hybrid_s: float
    meet_tokens: float
    break_even_tokens: float
    min_bandwidth: float

    @property
    def faster_alone(self) -> str:
        """Of the two ways that do not overlap."""
        return "fetch" if self.fetch_s <= self.compute_s else "recompute"

    @property
    def verdict(self) -> str:
        """fetch, recompute or overlap."""
        better = min(self.fetch_s, self.compute_s)
        return "overlap" if self.hybrid_s < better * _WORTH_OVERLAPPING else self.faster_alone


class HitAnswer(NamedTuple):
    """TTFT of a prompt of which a part is found in a tier."""

    tier: Tier
    hit_rate: float
    without_s: float  # all computed
    fetched_s: float
    overlapped_s: float


class KeepAnswer(NamedTuple):
    """Keep a token's KV if it is used again within ...: of the first token of the prefix, of a mean one, of the last."""

    storage: Storage
    first_s: float
    mean_s: float
    last_s: float


def answer_tier(prefill: costs.PrefillCost, tier: Tier, kv_bytes_per_token: float, num_tokens: float) -> TierAnswer:
    """All of `num_tokens` lie in the tier."""
    load, queued = tier.load, tier.queued_bytes
    return TierAnswer(
        tier,
        load.load_s(kv_bytes_per_token * num_tokens, queued),
        prefill.work_s(num_tokens),
        costs.hybrid_s(prefill, load, kv_bytes_per_token, num_tokens, queued_bytes=queued),
        costs.meet_tokens(prefill, load, kv_bytes_per_token, num_tokens, queued_bytes=queued),
        costs.break_even_tokens(prefill, load, kv_bytes_per_token, queued_bytes=queued),
        costs.min_bandwidth(prefill, kv_bytes_per_token, num_tokens, latency_s=load.latency_s),
    )


def break_even_band(
    fitted: FittedPrefill, answer: TierAnswer, kv_bytes_per_token: float, num_tokens: float
) -> tuple[float, float] | None:
    """The two ends between which the break-even length lies nine times of ten, by what is not known of the prefill; None if
    that is not known either. The tier is taken as it is given."""
    length = answer.break_even_tokens if math.isfinite(answer.break_even_tokens) else num_tokens
    error = fitted.error_of(max(length, 1.0))
    if math.isnan(error):
        return None
    ends = []
    for factor in reversed(band(1.0, error)):
        cost = scaled(fitted.cost, linear=factor, attention=factor, t0_s=fitted.cost.t0_s)
        tier = answer.tier
        ends.append(costs.break_even_tokens(cost, tier.load, kv_bytes_per_token, queued_bytes=tier.queued_bytes))
    return ends[0], ends[1]


def answer_hit_rate(
    fitted: FittedPrefill, tier: Tier, kv_bytes_per_token: float, num_tokens: int, hit_rate: float
) -> HitAnswer:
    """The first `hit_rate` of the prompt is found, but for the last token."""
    found = min(int(num_tokens * hit_rate), num_tokens - 1)
    rest_s = fitted.prefill_s(num_tokens - found, found)
    answer = answer_tier(fitted.cost, tier, kv_bytes_per_token, found)
    return HitAnswer(
        tier,
        hit_rate,
        fitted.prefill_s(num_tokens),
        answer.fetch_s + rest_s,
        (answer.hybrid_s if found else 0.0) + rest_s,
    )


def answer_storage(
    prefill: costs.PrefillCost,
    storage: Sequence[Storage],
    kv_bytes_per_token: float,
    num_tokens: float,
    gpus_usd_per_s: float,
) -> list[KeepAnswer]:
    """The storage interval of each."""
    mean_position = num_tokens / 2
    return [
        KeepAnswer(
            entry,
            *(
                costs.keep_interval_s(
                    prefill,
                    kv_bytes_per_token,
                    position_tokens=position,
                    gpus_usd_per_s=gpus_usd_per_s,
                    tier_usd_per_byte_s=entry.usd_per_byte_s,
                )
                for position in (0.0, mean_position, num_tokens)
            ),
        )
        for entry in storage
    ]


def usd_per_million_tokens(prefill: costs.PrefillCost, position_tokens: float, gpus_usd_per_s: float) -> float:
    """What computing a million tokens at that position costs, and a hit saves."""
    return prefill.token_s(position_tokens) * 1e6 * gpus_usd_per_s
