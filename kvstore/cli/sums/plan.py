"""`kvstore break-even plan`: a prompt whose prefix lies on several tiers, and the cut that the sidecar would choose."""

import re
from typing import Any, NamedTuple

import click

from kvstore.calculator.tier import Tier, parse_tier
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Work,
    as_count,
    as_seconds,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import NOT_NEGATIVE, efficiency, refuse, whole
from kvstore.cli.sums.inputs import GpuNumbers, ModelNumbers, gpu_options, model_options, need
from kvstore.cli.sums.prefill import prefill_cost
from kvstore.core.plans import TIERS
from kvstore.costs import PrefillCost, TierQuote, fetch_s, full_overlap_tokens, layerwise_s, meet_tokens
from kvstore.planner import PlanWish
from kvstore.planner import plan as find_plan
from kvstore.tables.rows import gpu as gpu_row

_TOKENS = whole(1, 1 << 22)
_COLUMNS = (
    Column("fetch_tokens", "prefix to", as_count),
    Column("fetch_s", "fetch", as_seconds),
    Column("compute_s", "then compute", as_seconds),
    Column("total_s", "TTFT", as_seconds),
    Column("shared_link_total_s", "on one link", as_seconds),
    Column("chosen", "choice", lambda chosen: "this" if chosen else ""),
)
_WAY_COLUMNS = (
    Column("way", "way"),
    Column("computed_tokens", "computed of it", as_count),
    Column("ttft_s", "TTFT", as_seconds),
)


class _Run(NamedTuple):
    """Blocks one after another on one tier."""

    tier: int  # its index in the tiers given
    num_blocks: int


class _Case(NamedTuple):
    wish: PlanWish
    cost: PrefillCost
    tiers: list[Tier]
    runs: list[_Run]

    @property
    def found(self) -> bytes:
        """For each block behind the context the number of its tier."""
        return b"".join(bytes([run.tier]) * run.num_blocks for run in self.runs)

    @property
    def quotes(self) -> dict[int, TierQuote]:
        return {number: TierQuote(tier.load, tier.queued_bytes) for number, tier in enumerate(self.tiers)}

    def compute_s(self, cut: int) -> float:
        """Of all behind the first `cut` blocks."""
        behind = self.wish.context_tokens + cut * self.wish.block_tokens
        return self.cost.prefill_s(self.wish.num_tokens - behind, behind)

    def fetch_s(self, cut: int, *, shared_link: bool = False) -> float:
        """Of the first `cut` blocks."""
        first = self.found[:cut]
        loads = [(quote, first.count(number) * self.wish.block_nbytes) for number, quote in self.quotes.items()]
        return fetch_s(loads, shared_link=shared_link)


@click.command(short_help="A prefix on several tiers: what to fetch.")
@model_options
@gpu_options
@click.option("--prompt", "num_tokens", type=_TOKENS, required=True, metavar="TOKENS", help="All of it.")
@click.option(
    "--on-engine",
    "context_tokens",
    type=whole(0, 1 << 22),
    default=0,
    metavar="TOKENS",
    help="Of its prefix that need no fetch.",
)
@click.option(
    "--found",
    "found",
    multiple=True,
    required=True,
    metavar="TIER=TOKENS",
    help="What lies behind them, in the order of the prefix. Repeatable.",
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME=GB/s,ms[,queued GB]",
    help="A tier of --found. Repeatable.  [default: the one of that name in the table]",
)
@click.option("--block-tokens", type=_TOKENS, default=16, show_default=True)
@click.option(
    "--wait-ms", type=NOT_NEGATIVE, default=0.0, show_default=True, help="Until the engine could begin: it is busy."
)
@click.option(
    "--efficiency", type=efficiency, help="Shares of the peak that GEMMs and attention reach; no overhead then."
)
@output_options
def plan(
    *,
    model: ModelNumbers,
    gpu: GpuNumbers,
    num_tokens: int,
    context_tokens: int,
    found: tuple[str, ...],
    tiers: tuple[str, ...],
    block_tokens: int,
    wait_ms: float,
    efficiency: tuple[float, float] | None,
    form: Form,
) -> None:
    """What the sidecar would have an engine fetch of a prompt whose prefix lies on several tiers, and what it would compute.

    Tiers work side by side; "on one link" is the same cut if their bytes come one after another.

    \b
    Example:
      kvstore break-even plan --model Llama-3.1-8B --gpu H100 --prompt 20000
        --found host-memory=8192 --found nvme=8192
    """
    kv_bytes = need(model.kv_bytes_per_token, "KV of a token", "--kv-bytes-per-token", by_name="--model")
    work: list[Work] = []
    cost = prefill_cost(model, gpu, efficiency, work)
    wish = PlanWish(
        num_tokens, context_tokens, block_tokens, int(kv_bytes * block_tokens), compute_wait_s=wait_ms / 1e3
    )
    case = _case(wish, cost, gpu, tiers, found)
    chosen = find_plan(wish, case.found, case.quotes, None, cost)
    cuts = sorted({*_ends(case), chosen.num_blocks})
    rows = [_row(case, cut, chosen=cut == chosen.num_blocks) for cut in cuts]
    for row in rows:
        work += _work(case, row)
    figures = [
        Figure("prompt_tokens", "tokens of the prompt", num_tokens, as_count),
        Figure("fetch_tokens", "prefix to take", context_tokens + chosen.num_blocks * block_tokens, as_count),
        Figure("fetch_s", "fetching it", chosen.fetch_s, as_seconds),
        Figure("total_s", "TTFT", chosen.total_s, as_seconds),
        Figure("recompute_s", "TTFT if nothing is fetched", chosen.recompute_s, as_seconds),
        Figure("deadline_s", "given up after", chosen.deadline_s, as_seconds),
    ]
    tables = [Rows("cuts", _COLUMNS, rows)]
    if _is_simple(case):
        title = "If the engine also computes while it loads (block edges and the last token left out)"
        tables.append(Rows("ways", _WAY_COLUMNS, _ways(case, kv_bytes, model.layers, work), title))
    write(Report(figures, tables, work, head=f"{model.name}: what to fetch"), form)


def _case(wish: PlanWish, cost: PrefillCost, gpu: GpuNumbers, tiers: tuple[str, ...], found: tuple[str, ...]) -> _Case:
    """The tiers that --found names, and what lies where. UsageError for what cannot be."""
    hardware = gpu.row or gpu_row("H100")
    known = {tier.name: tier for tier in (parse_tier(text, hardware, gpu.num_gpus) for text in tiers)}
    names: list[str] = []
    runs = []
    for text in found:
        hit = re.fullmatch(r"\s*(.*[^\s=])\s*=\s*([0-9]{1,7})\s*", text)
        if hit is None:
            refuse("--found", repr(text), "TIER=TOKENS, such as nvme=8192")
        name, tokens = hit[1], int(hit[2])
        if tokens == 0 or tokens % wish.block_tokens:
            refuse("--found", f"{text!r}: no whole blocks", f"a multiple of --block-tokens {wish.block_tokens}")
        if name not in known:
            known[name] = parse_tier(name, hardware, gpu.num_gpus)
        if name not in names:
            names.append(name)
        runs.append(_Run(names.index(name), tokens // wish.block_tokens))
    if len(names) > len(TIERS):
        refuse("--found", f"{len(names)} tiers", f"at most {len(TIERS)}")
    unused = [name for name in known if name not in names]
    if unused:
        refuse("--tier", f"{unused[0]!r}: nothing is found there", f"--found {unused[0]}=TOKENS, or leave it out")
    if wish.context_tokens % wish.block_tokens:
        right = f"a multiple of --block-tokens {wish.block_tokens}"
        refuse("--on-engine", f"{wish.context_tokens}: no whole blocks", right)
    prefix = wish.context_tokens + wish.block_tokens * sum(run.num_blocks for run in runs)
    if prefix > wish.num_tokens:
        refuse("--prompt", f"{wish.num_tokens} tokens, and a prefix of {prefix}", f"{prefix} or more")
    return _Case(wish, cost, [known[name] for name in names], runs)


def _ends(case: _Case) -> list[int]:
    """In blocks, where nothing is fetched and where each run ends. The last token is computed in any case."""
    most = (case.wish.num_tokens - 1 - case.wish.context_tokens) // case.wish.block_tokens
    ends = [0]
    for run in case.runs:
        ends.append(min(ends[-1] + run.num_blocks, most))
    return ends


def _row(case: _Case, cut: int, *, chosen: bool) -> dict[str, Any]:
    wait_s, compute_s = case.wish.compute_wait_s, case.compute_s(cut)
    fetch, one_link = case.fetch_s(cut), case.fetch_s(cut, shared_link=True)
    return {
        "fetch_tokens": case.wish.context_tokens + cut * case.wish.block_tokens,
        "fetch_s": fetch,
        "compute_s": compute_s,
        "total_s": max(wait_s, fetch) + compute_s,
        "shared_link_total_s": max(wait_s, one_link) + compute_s,
        "chosen": chosen,
    }


def _is_simple(case: _Case) -> bool:
    """One tier, from the start, on an idle engine: then the overlaps have closed forms."""
    return len(case.tiers) == 1 and not case.wish.context_tokens and not case.wish.compute_wait_s


def _ways(case: _Case, kv_bytes: float, layers: int | None, work: list[Work]) -> list[dict[str, Any]]:
    """TTFT by the two ends at once, by those hidden behind the tokens that are not found, and layer by layer."""
    cost, tier, n = case.cost, case.tiers[0], case.wish.num_tokens
    found = sum(run.num_blocks for run in case.runs) * case.wish.block_tokens
    rest_s = cost.prefill_s(n - found, found)
    meet = meet_tokens(cost, tier.load, kv_bytes, found, queued_bytes=tier.queued_bytes)
    hidden = full_overlap_tokens(cost, tier.load, kv_bytes, found, n, queued_bytes=tier.queued_bytes)
    ways = [
        ("both ends", meet, cost.work_s(meet) + rest_s),
        ("both ends, hidden behind the rest too", hidden, cost.work_s(hidden) + rest_s),
    ]
    formulas = [
        ("both ends", "C(x) + rest, with C(x) = latency + (queued + kv (N - x)) / B", meet),
        ("hidden", "C(x) + rest, with C(x) + rest = latency + (queued + kv (N - x)) / B, x at least 0", hidden),
    ]
    work += [
        Work(
            f"TTFT, {name}",
            formula,
            f"{as_term(cost.work_s(x))} + {as_term(rest_s)}",
            f"{as_term(cost.work_s(x) + rest_s)} s",
        )
        for name, formula, x in formulas
    ]
    if layers:
        transfer_s = kv_bytes * found / tier.load.bytes_per_s
        wait_s = tier.load.wait_s(tier.queued_bytes)
        seconds = layerwise_s(transfer_s, rest_s, layers, latency_s=wait_s)
        ways.append(("layer by layer", 0.0, seconds))
        load, rest = as_term(transfer_s), as_term(rest_s)
        work.append(
            Work(
                "TTFT, layer by layer",
                "wait + load/L + (1 - 1/L) * max(load, rest) + rest/L",
                f"{as_term(wait_s)} + {load}/{layers} + (1 - 1/{layers}) * max({load}, {rest}) + {rest}/{layers}",
                f"{as_term(seconds)} s",
            )
        )
    return [{"way": way, "computed_tokens": tokens, "ttft_s": seconds} for way, tokens, seconds in ways]


def _work(case: _Case, row: dict[str, Any]) -> list[Work]:
    wish, upto = case.wish, row["fetch_tokens"]
    cut = (upto - wish.context_tokens) // wish.block_tokens
    first = case.found[:cut]
    terms = [
        f"{as_term(tier.load.latency_s)} + ({as_term(tier.queued_bytes)} + {first.count(number)} * {wish.block_nbytes}) / "
        f"{as_term(tier.load.bytes_per_s)}"
        for number, tier in enumerate(case.tiers)
        if first.count(number)
    ]
    slowest = f"max({', '.join(terms)})" if len(terms) > 1 else "".join(terms) or "0"
    cost, n = case.cost, wish.num_tokens
    behind, values = "t0 + C(n) - C(m)", f"{as_term(cost.t0_s)} + C({n}) - C({upto})"
    if not cost.window_b_s:
        behind = "t0 + a (n - m) + b (n^2 - m^2)/2"
        values = (
            f"{as_term(cost.t0_s)} + {as_term(cost.a_s)} * ({n} - {upto}) + {as_term(cost.b_s)} * ({n}^2 - {upto}^2)/2"
        )
    formula = "the slowest of: latency + (queued + blocks * bytes) / B"
    return [
        Work(f"fetch to {upto}", formula, slowest, f"{as_term(row['fetch_s'])} s"),
        Work(f"compute from {upto}", behind, values, f"{as_term(row['compute_s'])} s"),
        Work(
            f"TTFT, to {upto}",
            "max(wait, fetch) + compute",
            f"max({as_term(wish.compute_wait_s)}, {as_term(row['fetch_s'])}) + {as_term(row['compute_s'])}",
            f"{as_term(row['total_s'])} s",
        ),
    ]
