"""How much of a match to fetch, and how much to compute instead: one decision per request, from measured speeds.

An engine that takes only a prefix gets the best cut: of n tokens, m are fetched and the rest computed behind them.

    T(m) = max(W, fetch(m)) + t0 + C(n) - C(m)     W: until the engine could begin anyway; waiting is free fetching time
    J(m) = T(m) + price * (C(n) - C(m))            price: what a second of the engine costs others, 0 when it is idle

J has its least value where blocks go over from one tier to another, or where W or another tier begins to be the last; all m
are looked at, in numpy, which takes less time than to find those few.

An engine that can compute at the front while blocks come from the back gets all of them from both ends, unless they would be
there sooner than it can compute one chunk. There no cut is needed, so none that is wrong; the plan only says where they
should meet, and how far the front should go where others wait for its engine.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.plans import TIERS, FetchPlan
from kvstore.costs import LoadCost, PrefillCost, TierQuote

PINNED = TIERS.index("pinned")

MIN_DEADLINE_S = 0.05
"""No fetch is given up sooner: below it the clock of a busy machine decides, not the tier."""

LATE = 2.0
"""A fetch may take so many times what was predicted, if that is long beside computing ..."""

LATE_RECOMPUTE_SHARE = 0.25
"""... or else so much longer, as a share of what computing all of it takes: more was not to be lost by trying."""

BOTH_ENDS_GAIN_CHUNKS, BOTH_ENDS_GAIN = 0.25, 0.1
"""Both ends must promise so much of a chunk's time, or so much of the best cut's: the front computes whole chunks, and may begin
one just before the back gets there. A cut is better where a load takes little longer than a chunk, and where the front lies
in RAM and the back on a slow drive: there the front should be fetched first."""

SHORT_S = 0.02
"""A load of less is over before a chunk could begin; and what is in RAM is there."""

UNKNOWN_DEADLINE_S = 1.0
"""A fetch may take so long, at least, while it is not known what computing instead would take; and one that is predicted to
take longer is long."""

_FREE = TierQuote(LoadCost(0.0, math.inf))
"""RAM that nobody quotes: its blocks are there, and only the copy into pages takes time."""

_Seconds = NDArray[np.float64]


class PlanWish(NamedTuple):
    """A request, as far as its plan depends on it."""

    num_tokens: int  # of the prompt
    context_tokens: int  # of them the engine has, whole blocks
    block_tokens: int
    block_nbytes: int
    chunk_tokens: int = 0  # of the engine's prefill; 0: unchunked
    compute_wait_s: float = 0.0  # until the engine could begin to compute
    compute_price: float = 0.0  # what a second of the engine costs others, in seconds of this request; 0: it is idle
    both_ends: bool = False  # the engine can compute at the front while blocks arrive from the back
    deadline_s: float = 0.0  # it waits no longer for a load; 0: no limit


def plan(
    wish: PlanWish,
    tiers: bytes,
    quotes: Mapping[int, TierQuote | None],
    copy: LoadCost | None = None,
    prefill: PrefillCost | None = None,
) -> FetchPlan:
    """The plan for a match whose blocks behind the context lie, each, on `tiers` (numbers as in TIERS).

    A tier without a quote is not used, and what lies behind its first block is not either; RAM needs none. All bytes go through
    `copy`, from the arena into pages, if that was measured. While it is not known what computing costs, all is fetched. The
    last token is never fetched: its logits are needed.
    """
    room = max(0, (wish.num_tokens - 1) // wish.block_tokens - wish.context_tokens // wish.block_tokens)
    found = tiers[:room]
    fetch = _Fetch(found[: _usable(found, quotes)], wish.block_nbytes, quotes, copy)
    if prefill is None:
        return _all_of_it(wish, fetch)
    work = _Work(wish, prefill, fetch.num_blocks)
    if not fetch.num_blocks:
        return _nothing(work, f"{TIERS[found[0]]} does not answer" if found else "nothing is found behind the context")
    cut = work.best_cut(fetch)
    if wish.both_ends and wish.chunk_tokens and fetch.all_s >= wish.compute_wait_s + work.chunk_s:
        meeting = _meet(fetch, work)
        if meeting is not None and meeting.is_worth_it(float(work.cost_s(fetch)[cut]), work.chunk_s):
            return _from_both_ends(wish, fetch, work, meeting)
    return _prefix(wish, fetch, work, cut)


class _Work:
    """Seconds of computing. A step's t0 is spread over the tokens of its chunk, and is paid once for the last step, which is
    there in any case."""

    def __init__(self, wish: PlanWish, prefill: PrefillCost, num_blocks: int) -> None:
        per_token_s = prefill.t0_s / wish.chunk_tokens if wish.chunk_tokens else 0.0
        cost = prefill._replace(a_s=prefill.a_s + per_token_s)
        positions = wish.context_tokens + wish.block_tokens * np.arange(num_blocks + 1, dtype=np.float64)
        done_s = _work_s(cost, positions)
        self.wish = wish
        self._t0_s = prefill.t0_s
        self.front_s: _Seconds = done_s - done_s[0]  # of the first m blocks behind the context
        self.rest_s: _Seconds = cost.work_s(wish.num_tokens) - done_s  # of all behind them
        self.recompute_s = self.total_s(0, 0.0)
        chunk_tokens = min(wish.chunk_tokens, wish.num_tokens - wish.context_tokens)
        self.chunk_s = cost.work_s(wish.context_tokens + chunk_tokens) - cost.work_s(wish.context_tokens)

    def total_s(self, cut: int, fetched_s: float) -> float:
        """T: until the prompt is computed, if the first `cut` blocks are there after `fetched_s`."""
        return max(self.wish.compute_wait_s, fetched_s) + self._t0_s + float(self.rest_s[cut])

    def cost_s(self, fetch: "_Fetch") -> _Seconds:
        """J, for every cut."""
        waited_s = np.maximum(self.wish.compute_wait_s, fetch.front_s)
        return np.asarray(waited_s + self._t0_s + (1 + self.wish.compute_price) * self.rest_s)

    def best_cut(self, fetch: "_Fetch") -> int:
        """The cut of least cost; of several the last."""
        cost_s = self.cost_s(fetch)
        return len(cost_s) - 1 - int(np.argmin(cost_s[::-1]))


class _Fetch:
    """Seconds of fetching. Tiers work side by side; a block is copied as soon as it is there, so the copy of all of them is one
    more link beside the tiers, and the slowest link decides."""

    def __init__(
        self, tiers: bytes, block_nbytes: int, quotes: Mapping[int, TierQuote | None], copy: LoadCost | None
    ) -> None:
        at = np.frombuffer(tiers, np.uint8)
        self.num_blocks = len(tiers)
        self._block_nbytes = block_nbytes
        self._links = [(TIERS[tier], quotes.get(tier) or _FREE, at == tier) for tier in sorted(set(tiers))]
        if copy is not None:
            self._links.append(("copy", TierQuote(copy), np.ones(len(tiers), np.bool_)))
        counts = [np.concatenate(([0], np.cumsum(uses))) for _, _, uses in self._links]
        self.front_s = self._slowest_s(counts)  # of the first m blocks
        self.back_s = self._slowest_s([count[-1] - count for count in counts])  # of all but those
        self.all_s = float(self.front_s[-1])
        self.may_be_late = self.all_s >= SHORT_S and bool((at != PINNED).any())

    def words(self, cut: int) -> str:
        """What the first `cut` blocks need: how much, how fast, how long."""
        parts = []
        for name, quote, uses in self._links:
            nbytes = int(np.count_nonzero(uses[:cut])) * self._block_nbytes
            if nbytes and quote is not _FREE:
                behind = f" behind {_mb(quote.queued_bytes)}" if quote.queued_bytes else ""
                parts.append(
                    f"{name} {_mb(nbytes)}{behind} at {quote.load.bytes_per_s / 1e9:.3g} GB/s: {_s(quote.load_s(nbytes))}"
                )
        return "; ".join(parts) or f"{_mb(cut * self._block_nbytes)} in RAM"

    def _slowest_s(self, counts: list[NDArray[np.int64]]) -> _Seconds:
        slowest_s = np.zeros(self.num_blocks + 1)
        for (_, quote, _), count in zip(self._links, counts, strict=True):
            block_s = quote.load.token_s(self._block_nbytes)
            link_s = np.where(count > 0, quote.load.wait_s(quote.queued_bytes) + count * block_s, 0.0)
            slowest_s = np.maximum(slowest_s, link_s)
        return slowest_s


class _Meeting(NamedTuple):
    """Where the two ends meet, in blocks."""

    front: int  # so many are computed
    met_s: float
    cost_s: float

    def is_worth_it(self, cut_cost_s: float, chunk_s: float) -> bool:
        """Against the best cut."""
        return cut_cost_s - self.cost_s >= min(BOTH_ENDS_GAIN_CHUNKS * chunk_s, BOTH_ENDS_GAIN * cut_cost_s)


def _meet(fetch: _Fetch, work: _Work) -> _Meeting | None:
    """Where they are expected to; None if not one block would come from the back in time."""
    wish = work.wish
    has_met = wish.compute_wait_s + work.front_s >= fetch.back_s
    meet = int(np.argmax(has_met))
    if meet == fetch.num_blocks:
        return None
    # Beyond this many, a block costs others more than this request gains by not waiting for it.
    is_dear = wish.compute_price * np.diff(work.front_s) > fetch.all_s / fetch.num_blocks
    cheap = int(np.argmax(is_dear)) if is_dear.any() else fetch.num_blocks
    front = min(meet, cheap)
    met_s = max(wish.compute_wait_s + float(work.front_s[front]), float(fetch.back_s[front]))
    price_s = wish.compute_price * float(work.front_s[front] + work.rest_s[-1])
    return _Meeting(front, met_s, work.total_s(fetch.num_blocks, met_s) + price_s)


def _from_both_ends(wish: PlanWish, fetch: _Fetch, work: _Work, meeting: _Meeting) -> FetchPlan:
    num_blocks, front = fetch.num_blocks, meeting.front
    computing_s = float(work.front_s[-1])
    return FetchPlan(
        num_blocks=num_blocks,
        both_ends=True,
        front_blocks=front,
        fetch_s=fetch.all_s,
        recompute_s=work.recompute_s,
        total_s=work.total_s(num_blocks, meeting.met_s),
        deadline_s=_deadline_s(wish, float(fetch.back_s[front]), computing_s),
        reason=f"{fetch.words(num_blocks)}, computing them {_s(computing_s)}; "
        f"from both ends {_s(meeting.met_s)}, {front} of {num_blocks} blocks computed",
    )


def _prefix(wish: PlanWish, fetch: _Fetch, work: _Work, cut: int) -> FetchPlan:
    considered = cut or fetch.num_blocks
    reason = f"{fetch.words(considered)}, computing them {_s(float(work.front_s[considered]))}"
    if cut == 0:
        return _nothing(work, reason)
    fetch_s = float(fetch.front_s[cut])
    # Who can compute at the front does so if the load is late, instead of giving up a load that still comes.
    from_back = bool(wish.both_ends and wish.chunk_tokens) and cut == fetch.num_blocks and fetch.may_be_late
    return FetchPlan(
        num_blocks=cut,
        both_ends=from_back,
        front_blocks=0,
        fetch_s=fetch_s,
        recompute_s=work.recompute_s,
        total_s=work.total_s(cut, fetch_s),
        deadline_s=_deadline_s(wish, fetch_s, float(work.front_s[cut])),
        reason=reason,
    )


def _all_of_it(wish: PlanWish, fetch: _Fetch) -> FetchPlan:
    """It is not known what computing costs. From both ends that does not matter either: the engine begins at once if the load is
    long, and else if it is late, since a chunk that has begun is not interrupted."""
    num_blocks = fetch.num_blocks
    both_ends = bool(num_blocks and wish.both_ends and wish.chunk_tokens)
    is_long = fetch.all_s >= UNKNOWN_DEADLINE_S
    unknown = "what computing costs is not known yet"
    return FetchPlan(
        num_blocks=num_blocks,
        both_ends=both_ends,
        front_blocks=num_blocks // 2 if both_ends and is_long else 0,
        fetch_s=fetch.all_s,
        recompute_s=0.0,
        total_s=fetch.all_s,
        deadline_s=_deadline_s(wish, max(fetch.all_s, UNKNOWN_DEADLINE_S / LATE), 0.0) if num_blocks else 0.0,
        reason=f"{fetch.words(num_blocks)}; {unknown}"
        if num_blocks
        else f"nothing that can be used is found; {unknown}",
    )


def _nothing(work: _Work, reason: str) -> FetchPlan:
    return FetchPlan(
        num_blocks=0,
        both_ends=False,
        front_blocks=0,
        fetch_s=0.0,
        recompute_s=work.recompute_s,
        total_s=work.recompute_s,
        deadline_s=0.0,
        reason=reason,
    )


def _usable(tiers: bytes, quotes: Mapping[int, TierQuote | None]) -> int:
    """Length of the run of blocks whose tier may be used."""

    def is_open(tier: int) -> bool:
        quote = quotes.get(tier, _FREE if tier == PINNED else None)
        return quote is not None and quote.load.bytes_per_s > 0

    return min((tiers.index(tier) for tier in set(tiers) if not is_open(tier)), default=len(tiers))


def _deadline_s(wish: PlanWish, fetch_s: float, computing_s: float) -> float:
    late_s = max(LATE * fetch_s, fetch_s + LATE_RECOMPUTE_SHARE * computing_s, MIN_DEADLINE_S)
    return min(late_s, wish.deadline_s) if wish.deadline_s else late_s


def _work_s(cost: PrefillCost, tokens: _Seconds) -> _Seconds:
    """PrefillCost.work_s, of many at once."""
    seen = np.minimum(tokens, cost.window_tokens)
    windowed = seen * (tokens - seen / 2)
    return np.asarray(cost.a_s * tokens + cost.b_s * tokens * tokens / 2 + cost.window_b_s * windowed)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.4g} MB"
