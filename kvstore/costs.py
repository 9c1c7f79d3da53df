"""What a prefix costs: seconds to compute it, seconds to fetch it, and where the two meet.

Seconds, bytes, tokens; bandwidths in bytes (not GiB) a second. `C(x) = a x + b x^2 / 2` is the work of computing the first x
tokens: every token passes the weights (a), and looks back at all before it (b, so half of a square). Computing [s, e) after
a cached prefix is `C(e) - C(s)`: later tokens are dearer. A load is `latency + (queued + nbytes) / bandwidth`. With these two
each question below has a closed form; a sliding window makes C a quadratic up to the window and another one beyond it, so
its closed forms have two pieces.

The meeting point of computing at the front and loading from the back is Cake's (Jin et al., "Compute or load KV cache? Why
not both?"); the storage interval is Gray's five-minute rule.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Self


class PrefillCost(NamedTuple):
    """What an engine needs to compute tokens: the three constants of its deployment, and two more for sliding windows."""

    t0_s: float  # of a step, whatever is in it
    a_s: float  # of a token at position 0
    b_s: float  # more of it for each token of context, from layers that see all of it
    window_b_s: float = 0.0  # likewise, from layers that see only the last `window_tokens`
    window_tokens: int = 0

    @classmethod
    def from_flops(
        cls,
        params: float,
        attention_flops_per_pair: float,
        peak_flops: float,
        *,
        linear_efficiency: float,
        attention_efficiency: float,
        t0_s: float = 0.0,
        window_flops_per_pair: float = 0.0,
        window_tokens: int = 0,
    ) -> Self:
        """The constants from a model's shape: `params` that every token passes (no embedding, no LM head; of experts only
        those chosen), FLOP of attention for each pair of query and key over all full layers, and over those with a window;
        `peak_flops` of all GPUs together, of which the efficiencies are reached."""
        attention_flops = peak_flops * attention_efficiency
        return cls(
            t0_s=t0_s,
            a_s=2 * params / (peak_flops * linear_efficiency),
            b_s=attention_flops_per_pair / attention_flops,
            window_b_s=window_flops_per_pair / attention_flops,
            window_tokens=window_tokens,
        )

    def work_s(self, tokens: float) -> float:
        """C(x): seconds of computing the first `tokens` tokens, without t0."""
        seen = min(tokens, self.window_tokens)
        windowed = seen * (tokens - seen / 2)
        return self.a_s * tokens + self.b_s * tokens * tokens / 2 + self.window_b_s * windowed

    def token_s(self, position: float) -> float:
        """C'(x): seconds that one more token costs behind `position` others."""
        return self.a_s + self.b_s * position + self.window_b_s * min(position, self.window_tokens)

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0, *, chunk_tokens: int = 0) -> float:
        """Seconds of computing `num_tokens` behind `context_tokens` that are cached, in steps of `chunk_tokens` (0: in one)."""
        if num_tokens <= 0:
            return 0.0
        num_steps = math.ceil(num_tokens / chunk_tokens) if chunk_tokens else 1
        return self.t0_s * num_steps + self.work_s(context_tokens + num_tokens) - self.work_s(context_tokens)

    def tokens_for(self, seconds: float, *, extra_token_s: float = 0.0) -> float:
        """x with `C(x) + extra_token_s * x = seconds`: how far one gets. `extra_token_s` may be negative (then it is the
        larger root). math.inf where x would have no bound. `seconds` is not negative."""
        linear = self.a_s + extra_token_s
        if not self.window_b_s:
            return _root(linear, self.b_s, seconds)
        near = _root(linear, self.b_s + self.window_b_s, seconds)
        if near <= self.window_tokens:
            return near
        grown = self.window_b_s * self.window_tokens
        return _root(linear + grown, self.b_s, seconds + grown * self.window_tokens / 2)


class LoadCost(NamedTuple):
    """What a tier, or a copy, needs to deliver bytes."""

    latency_s: float
    bytes_per_s: float  # what arrives, not what the data sheet says

    def load_s(self, nbytes: float, queued_bytes: float = 0.0) -> float:
        """Seconds until `nbytes` are there, behind `queued_bytes` that were ordered before. Nothing costs nothing."""
        if nbytes <= 0:
            return 0.0
        if self.bytes_per_s <= 0:
            return math.inf
        return self.latency_s + (queued_bytes + nbytes) / self.bytes_per_s

    def wait_s(self, queued_bytes: float = 0.0) -> float:
        """Seconds until a first byte would come."""
        return self.latency_s + (queued_bytes / self.bytes_per_s if self.bytes_per_s > 0 else math.inf)

    def token_s(self, kv_bytes_per_token: float) -> float:
        """Seconds a token's KV takes, once it flows."""
        return kv_bytes_per_token / self.bytes_per_s if self.bytes_per_s > 0 else math.inf


class TierQuote(NamedTuple):
    """What a tier would need now."""

    load: LoadCost
    queued_bytes: float = 0.0  # ordered and not yet there

    def load_s(self, nbytes: float) -> float:
        """Seconds until `nbytes` are there if they are ordered now."""
        return self.load.load_s(nbytes, self.queued_bytes)


def fetch_s(loads: Iterable[tuple[TierQuote, float]], *, shared_link: bool = False) -> float:
    """Seconds until the bytes of each tier are there: the slowest of them, or their sum where they share one link."""
    seconds = [quote.load_s(nbytes) for quote, nbytes in loads]
    return math.fsum(seconds) if shared_link else max(seconds, default=0.0)


def break_even_tokens(
    prefill: PrefillCost, load: LoadCost, kv_bytes_per_token: float, *, queued_bytes: float = 0.0
) -> float:
    """N*: the prefix length from which loading all of it takes no longer than computing it; math.inf if that never comes.
    t0 is in neither: the last token is computed in any case, and pays it."""
    if load.bytes_per_s <= 0:
        return math.inf
    return prefill.tokens_for(load.wait_s(queued_bytes), extra_token_s=-load.token_s(kv_bytes_per_token))


def min_bandwidth(
    prefill: PrefillCost, kv_bytes_per_token: float, num_tokens: float, *, latency_s: float = 0.0
) -> float:
    """B_min: bytes a second below which loading `num_tokens` takes longer than computing them; math.inf if the latency alone
    does."""
    spare_s = prefill.work_s(num_tokens) - latency_s
    return kv_bytes_per_token * num_tokens / spare_s if spare_s > 0 else math.inf


def mooncake_min_bandwidth(
    kv_bytes_per_token_layer: float,
    hidden: int,
    peak_flops: float,
    num_tokens: float,
    *,
    a: float = 4.0,
    b: float = 22.0,
) -> float:
    """Mooncake's rule for the same (Qin et al., FAST'25, Eq. 2), to compare with: KV bytes of a token and layer over FLOP of
    the same, `a p d + b d^2`, at the peak. It has each token look at all p, where a causal one looks at half of them, which makes
    computing too dear; and has the peak reached, which makes it too cheap. Dense models with grouped queries only."""
    return peak_flops * kv_bytes_per_token_layer / (a * num_tokens * hidden + b * hidden * hidden)


def meet_tokens(
    prefill: PrefillCost, load: LoadCost, kv_bytes_per_token: float, num_tokens: float, *, queued_bytes: float = 0.0
) -> float:
    """x*, clamped to [0, num_tokens]: computing [0, x) from the front ends when [x, num_tokens) has come from the back.
    The front is the computed side: it needs nothing loaded, and its tokens are the cheapest."""
    if load.bytes_per_s <= 0:
        return num_tokens
    token_s = load.token_s(kv_bytes_per_token)
    meet = prefill.tokens_for(load.wait_s(queued_bytes) + token_s * num_tokens, extra_token_s=token_s)
    return min(meet, num_tokens)


def hybrid_s(
    prefill: PrefillCost, load: LoadCost, kv_bytes_per_token: float, num_tokens: float, *, queued_bytes: float = 0.0
) -> float:
    """Seconds until the two ends have met, without what is computed behind them: C(x*). Never more than the better of
    loading all and computing all."""
    return prefill.work_s(meet_tokens(prefill, load, kv_bytes_per_token, num_tokens, queued_bytes=queued_bytes))


def full_overlap_tokens(
    prefill: PrefillCost,
    load: LoadCost,
    kv_bytes_per_token: float,
    num_tokens: float,
    prompt_tokens: float,
    *,
    queued_bytes: float = 0.0,
) -> float:
    """As `meet_tokens`, if the load may also hide behind the computing of [num_tokens, prompt_tokens), layer by layer. 0
    where that alone takes as long as the whole load."""
    if load.bytes_per_s <= 0:
        return num_tokens
    token_s = load.token_s(kv_bytes_per_token)
    suffix_s = prefill.work_s(prompt_tokens) - prefill.work_s(num_tokens)
    exposed_s = load.wait_s(queued_bytes) + token_s * num_tokens - suffix_s
    return min(prefill.tokens_for(max(exposed_s, 0.0), extra_token_s=token_s), num_tokens)


def full_overlap_s(
    prefill: PrefillCost,
    load: LoadCost,
    kv_bytes_per_token: float,
    num_tokens: float,
    prompt_tokens: float,
    *,
    queued_bytes: float = 0.0,
) -> float:
    """Seconds until the prompt is computed, for `full_overlap_tokens`: C(x) and what lies behind the cached part."""
    meet = full_overlap_tokens(prefill, load, kv_bytes_per_token, num_tokens, prompt_tokens, queued_bytes=queued_bytes)
    return prefill.work_s(meet) + prefill.work_s(prompt_tokens) - prefill.work_s(num_tokens)


def layerwise_s(transfer_s: float, suffix_s: float, num_layers: int, *, latency_s: float = 0.0) -> float:
    """Seconds if all is loaded, layer after layer, and the suffix's layers are computed behind it (CachedAttention): the
    first layer's load, the slower of the two for the others, the last layer's computing. `transfer_s` without latency."""
    share = 1 / num_layers
    return latency_s + transfer_s * share + (1 - share) * max(transfer_s, suffix_s) + suffix_s * share


def keep_interval_s(
    prefill: PrefillCost,
    kv_bytes_per_token: float,
    *,
    position_tokens: float = 0.0,
    gpus_usd_per_s: float,
    tier_usd_per_byte_s: float,
) -> float:
    """Keep a block if it is used again within this time: until then its storage costs less than the GPUs' time to compute
    it. Grows with the position: late blocks are dearer to compute, and no larger."""
    rent = kv_bytes_per_token * tier_usd_per_byte_s
    return prefill.token_s(position_tokens) * gpus_usd_per_s / rent if rent > 0 else math.inf


def block_value(
    prefill: PrefillCost, position_tokens: float, block_tokens: float, nbytes: float, reuse_probability: float = 1.0
) -> float:
    """Seconds of prefill that a byte of this block may be expected to save. Blocks of a prefix are worth the more the
    further back they lie, but only together with all before them."""
    saved_s = prefill.work_s(position_tokens + block_tokens) - prefill.work_s(position_tokens)
    return saved_s * reuse_probability / nbytes


def _root(linear: float, square: float, total: float) -> float:
    """The x >= 0 with `linear x + square x^2 / 2 = total`, the largest if there are two; math.inf if there is none.
    `square` and `total` are not negative. The form without cancellation is used on either side."""
    if linear >= 0:
        if total <= 0:
            return 0.0
        divisor = linear + math.sqrt(linear * linear + 2 * square * total)
        return 2 * total / divisor if divisor > 0 else math.inf
    if square <= 0:
        return math.inf
    return (math.sqrt(linear * linear + 2 * square * total) - linear) / square
