"""What `kvstore break-even` has to say of a case: figures, tables, working, and the lines of its plot."""

import math
from collections.abc import Sequence

from kvstore.calculator.break_even import (
    MONTH_S,
    HitAnswer,
    KeepAnswer,
    Storage,
    TierAnswer,
    answer_hit_rate,
    answer_storage,
    answer_tier,
    break_even_band,
    usd_per_million_tokens,
)
from kvstore.calculator.case import Case
from kvstore.calculator.drawing import Series
from kvstore.calculator.fit import band
from kvstore.cli.output import (
    Column,
    Figure,
    Report,
    Rows,
    Value,
    Work,
    as_bandwidth,
    as_bytes,
    as_count,
    as_dollars,
    as_percent,
    as_seconds,
    as_term,
)
from kvstore.costs import mooncake_min_bandwidth

_PLOT_POINTS = 60
_PLOT_SHORTEST = 128
_PLOT_LONGEST = 131_072
_NO_PRICE = "prices are left out: the GPU's is not known; give --gpu-usd-per-h"


def make_report(case: Case, hit_rates: Sequence[float], storage: Sequence[Storage]) -> Report:
    """All answers to it."""
    cost, kv_bytes, num_tokens = case.fitted.cost, case.kv_bytes_per_token, case.num_tokens
    answers = [answer_tier(cost, tier, kv_bytes, num_tokens) for tier in case.tiers]
    hits = [answer_hit_rate(case.fitted, tier, kv_bytes, num_tokens, part) for tier in case.tiers for part in hit_rates]
    keeps = answer_storage(cost, storage, kv_bytes, num_tokens, case.gpus_usd_per_s) if case.gpus_usd_per_s else []
    notes = [*case.warnings, *_close_calls(case, answers), *([] if case.gpus_usd_per_s else [_NO_PRICE])]
    tables = [_tier_rows(case, answers), _hit_rows(hits)]
    if keeps:
        tables.append(_keep_rows(keeps))
    return Report(
        figures=_figures(case),
        tables=tables,
        work=[
            *_prefill_work(case),
            *(line for answer in answers for line in _tier_work(case, answer)),
            *_money_work(case, keeps),
        ],
        notes=notes,
        head=_head(case),
    )


def plot_series(case: Case) -> list[Series]:
    """Computing, and of each tier fetching and both ends at once, over lengths up to twice the one asked for."""
    longest = max(2 * case.num_tokens, _PLOT_LONGEST)
    ratio = (longest / _PLOT_SHORTEST) ** (1 / (_PLOT_POINTS - 1))
    lengths = [_PLOT_SHORTEST * ratio**at for at in range(_PLOT_POINTS)]
    series = [Series("compute", [(length, case.fitted.prefill_s(length)) for length in lengths])]
    step_s = case.fitted.prefill_s(1, case.num_tokens)
    for tier in case.tiers:
        answers = [(length, answer_tier(case.fitted.cost, tier, case.kv_bytes_per_token, length)) for length in lengths]
        series.append(Series(f"fetch, {tier.name}", [(length, answer.fetch_s + step_s) for length, answer in answers]))
        both = [(length, answer.hybrid_s + step_s) for length, answer in answers]
        series.append(Series(f"both ends, {tier.name}", both, dashed=True))
    if case.points:
        series.append(
            Series("measured", [(point.num_tokens, point.seconds) for point in case.points], marks=True, line=False)
        )
    return series


def _head(case: Case) -> str:
    where = "what was measured" if case.setup is None else f"{case.setup.num_gpus} x {case.setup.gpu.name}"
    return f"{case.model.shape.name} on {where}, {case.num_tokens:,} tokens cached"


def _figures(case: Case) -> list[Figure]:
    cost, num_tokens = case.fitted.cost, case.num_tokens
    prefill_s = case.fitted.prefill_s(num_tokens)
    error = case.fitted.error_of(num_tokens)
    low, high = band(prefill_s, error) if math.isfinite(error) else (None, None)
    figures = [
        Figure("model", "model", case.model.shape.name),
        Figure("context_tokens", "prefix", num_tokens, lambda value: f"{value:,} tokens"),
        Figure("kv_bytes_per_token", "KV of a token", _whole(case.kv_bytes_per_token), lambda value: f"{value:,.0f} B"),
        Figure("kv_bytes", "KV of the prefix", case.kv_bytes_per_token * num_tokens, as_bytes),
        Figure("prefill_s", "computing the prefix", prefill_s, as_seconds),
        Figure("prefill_low_s", "  nine of ten from", low, as_seconds),
        Figure("prefill_high_s", "  to", high, as_seconds),
        Figure("prefill_t0_s", "  of it t0", cost.t0_s, as_seconds),
        Figure("prefill_a_s", "  a, of each token", cost.a_s, as_seconds),
        Figure("prefill_b_s", "  b, of each token looked back at", cost.b_s, lambda value: f"{value:.4g} s"),
        Figure("prefill_source", "  from", case.prefill_source),
    ]
    rule = _mooncake(case)
    if rule is not None:
        figures.append(Figure("mooncake_min_bandwidth_bytes_per_s", "needed by Mooncake's Eq. 2", rule, as_bandwidth))
    if case.gpus_usd_per_s:
        for name, title, position in (
            ("first", "a million tokens saved, at the start", 0.0),
            ("mean", "  on average", num_tokens / 2),
            ("last", "  at the end", num_tokens),
        ):
            usd = usd_per_million_tokens(cost, position, case.gpus_usd_per_s)
            figures.append(Figure(f"usd_per_million_tokens_{name}", title, usd, as_dollars))
    return figures


def _mooncake(case: Case) -> float | None:
    """Its rule, for comparison; None for models it is not about, or without a GPU's peak."""
    shape = case.model.shape
    if case.setup is None or not (shape.is_dense and shape.layers and shape.hidden):
        return None
    per_layer = case.kv_bytes_per_token / shape.layers
    return mooncake_min_bandwidth(per_layer, shape.hidden, case.setup.linear_flops_per_s, case.num_tokens)


def _tier_rows(case: Case, answers: Sequence[TierAnswer]) -> Rows:
    columns = [
        Column("name", "tier"),
        Column("fetch_s", "fetch", as_seconds),
        Column("hybrid_s", "both ends", as_seconds),
        Column("meet_tokens", "meet at", as_count),
        Column("break_even_tokens", "fetch wins from", _as_length),
        Column("min_bandwidth_bytes_per_s", "needs", as_bandwidth),
        Column("verdict", "verdict"),
        Column("compute_s", ""),
        Column("bytes_per_s", ""),
        Column("latency_s", ""),
        Column("queued_bytes", ""),
        Column("faster_alone", ""),
        Column("break_even_low_tokens", ""),
        Column("break_even_high_tokens", ""),
        Column("source", ""),
    ]
    bands = [break_even_band(case.fitted, answer, case.kv_bytes_per_token, case.num_tokens) for answer in answers]
    found: list[dict[str, Value]] = [
        {
            "name": answer.tier.name,
            "fetch_s": answer.fetch_s,
            "hybrid_s": answer.hybrid_s,
            "meet_tokens": answer.meet_tokens,
            "break_even_tokens": answer.break_even_tokens,
            "min_bandwidth_bytes_per_s": answer.min_bandwidth,
            "verdict": answer.verdict,
            "compute_s": answer.compute_s,
            "bytes_per_s": answer.tier.load.bytes_per_s,
            "latency_s": answer.tier.load.latency_s,
            "queued_bytes": answer.tier.queued_bytes,
            "faster_alone": answer.faster_alone,
            "break_even_low_tokens": ends[0] if ends else None,
            "break_even_high_tokens": ends[1] if ends else None,
            "source": answer.tier.source,
        }
        for answer, ends in zip(answers, bands, strict=True)
    ]
    return Rows("tiers", columns, found, f"Fetching {case.num_tokens:,} tokens, or computing them")


def _close_calls(case: Case, answers: Sequence[TierAnswer]) -> list[str]:
    """Tiers of which it is not sure whether fetching wins at this length."""
    found = []
    for answer in answers:
        ends = break_even_band(case.fitted, answer, case.kv_bytes_per_token, case.num_tokens)
        if ends is not None and ends[0] <= case.num_tokens <= ends[1]:
            low, high = map(_as_length, ends)
            found.append(
                f"{answer.tier.name}: a close call: fetching wins from {low} tokens on or from {high}, by the two ends of what "
                "is known of the prefill; --measured makes it surer"
            )
    return found


def _hit_rows(hits: Sequence[HitAnswer]) -> Rows:
    columns = [
        Column("name", "tier"),
        Column("hit_rate", "found", as_percent),
        Column("without_s", "TTFT without", as_seconds),
        Column("fetched_s", "fetched", as_seconds),
        Column("overlapped_s", "both ends", as_seconds),
    ]
    found: list[dict[str, Value]] = [
        {
            "name": hit.tier.name,
            "hit_rate": hit.hit_rate,
            "without_s": hit.without_s,
            "fetched_s": hit.fetched_s,
            "overlapped_s": hit.overlapped_s,
        }
        for hit in hits
    ]
    return Rows("hit_rates", columns, found, "Time to the first token of a prompt of that length, by the part found")


def _keep_rows(keeps: Sequence[KeepAnswer]) -> Rows:
    columns = [
        Column("name", "storage"),
        Column("usd_per_gb_month", "GB-month", as_dollars),
        Column("keep_first_s", "first token", as_seconds),
        Column("keep_mean_s", "mean", as_seconds),
        Column("keep_last_s", "last token", as_seconds),
    ]
    found: list[dict[str, Value]] = [
        {
            "name": keep.storage.name,
            "usd_per_gb_month": keep.storage.usd_per_byte_s * 1e9 * MONTH_S,
            "keep_first_s": keep.first_s,
            "keep_mean_s": keep.mean_s,
            "keep_last_s": keep.last_s,
        }
        for keep in keeps
    ]
    return Rows("storage", columns, found, "Keep KV if it is used again within")


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _as_length(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "never"


def _prefill_work(case: Case) -> list[Work]:
    """How a, b and the prefill came about."""
    cost, num_tokens, shape = case.fitted.cost, case.num_tokens, case.model.shape
    work = [
        Work(
            "kv_bytes_per_token", case.model.kv_formula, case.model.kv_substituted, f"{case.kv_bytes_per_token:,.0f} B"
        )
    ]
    work.append(
        Work(
            "kv_bytes",
            "kv_bytes_per_token*N",
            f"{as_term(case.kv_bytes_per_token)}*{num_tokens}",
            as_bytes(case.kv_bytes_per_token * num_tokens),
        )
    )
    if case.efficiency is not None and case.setup is not None:
        linear, attention = case.efficiency
        peaks = as_term(case.setup.linear_flops_per_s), as_term(case.setup.attn_flops_per_s)
        flops = as_term(shape.attn_flops_per_pair)
        work.append(
            Work(
                "a",
                "2*P/(G*efficiency)",
                f"2*{as_term(shape.prefill_params)}/({peaks[0]}*{linear:g})",
                f"{cost.a_s:.6g} s",
            )
        )
        work.append(Work("b", "A/(G*efficiency)", f"{flops}/({peaks[1]}*{attention:g})", f"{cost.b_s:.6g} s"))
    else:
        work += [
            Work(name, case.prefill_source, "", f"{value:.6g} s")
            for name, value in (("t0", cost.t0_s), ("a", cost.a_s), ("b", cost.b_s))
        ]
    terms = f"{as_term(cost.a_s)}*{num_tokens} + {as_term(cost.b_s)}*{num_tokens}^2/2"
    formula = "a*N + b*N^2/2"
    if cost.window_b_s:
        formula += " + b_w*(N^2/2 up to w, w*N - w^2/2 beyond)"
        seen = min(num_tokens, cost.window_tokens)
        terms += f" + {as_term(cost.window_b_s)}*{seen}*({num_tokens} - {seen}/2)"
    work.append(Work("C(N)", formula, terms, f"{cost.work_s(num_tokens):.6g} s"))
    floor = "sqrt(t0^2 + (a*N)^2) + b*N^2/2" if case.fitted.floor_bound else "t0 + C(N)"
    given = f"{as_term(cost.t0_s)}, and C(N) above"
    work.append(Work("prefill_s", floor, given, f"{case.fitted.prefill_s(num_tokens):.6g} s"))
    rule = _mooncake(case)
    if rule is not None and case.setup is not None:
        peak, d = as_term(case.setup.linear_flops_per_s), shape.hidden
        values = f"{peak}*{as_term(case.kv_bytes_per_token)}/{shape.layers}/(4*{num_tokens}*{d} + 22*{d}^2)"
        work.append(Work("mooncake_min_bandwidth", "G*kv/layers/(4*N*d + 22*d^2)", values, as_bandwidth(rule)))
    return work


def _tier_work(case: Case, answer: TierAnswer) -> list[Work]:
    """How a tier's numbers came about."""
    name, load, queued = answer.tier.name, answer.tier.load, as_term(answer.tier.queued_bytes)
    kv, num_tokens = as_term(case.kv_bytes_per_token), case.num_tokens
    lat, rate = as_term(load.latency_s), as_term(load.bytes_per_s)
    cost = case.fitted.cost
    a, b = as_term(cost.a_s), as_term(cost.b_s)
    window = " (and the window's part of C)" if cost.window_b_s else ""
    wait = f"({lat} + {queued}/{rate})"
    slope = f"({a} - {kv}/{rate})"
    return [
        Work(
            f"{name}: fetch_s",
            "latency + (queued + kv*N)/B",
            f"{lat} + ({queued} + {kv}*{num_tokens})/{rate}",
            f"{answer.fetch_s:.6g} s",
        ),
        Work(
            f"{name}: break_even_tokens",
            f"(-(a - kv/B) + sqrt((a - kv/B)^2 + 2*b*(latency + queued/B)))/b{window}",
            f"(-{slope} + sqrt({slope}^2 + 2*{b}*{wait}))/{b}",
            f"{answer.break_even_tokens:,.1f} tokens",
        ),
        Work(
            f"{name}: min_bandwidth",
            "kv*N/(C(N) - latency)",
            f"{kv}*{num_tokens}/({as_term(answer.compute_s)} - {lat})",
            as_bandwidth(answer.min_bandwidth),
        ),
        Work(
            f"{name}: meet_tokens",
            f"x with a*x + b*x^2/2 = latency + (queued + kv*(N - x))/B, at most N{window}",
            f"x with {a}*x + {b}*x^2/2 = {wait} + {kv}*({num_tokens} - x)/{rate}",
            f"{answer.meet_tokens:,.1f} tokens",
        ),
        Work(f"{name}: hybrid_s", "C(meet_tokens)", f"C({answer.meet_tokens:.1f})", f"{answer.hybrid_s:.6g} s"),
        Work(
            f"{name}: verdict",
            "overlap if hybrid_s < 0.9*min(fetch_s, C(N)), else the smaller of the two",
            f"{answer.hybrid_s:.6g}, {answer.fetch_s:.6g}, {answer.compute_s:.6g}",
            answer.verdict,
        ),
    ]


def _money_work(case: Case, keeps: Sequence[KeepAnswer]) -> list[Work]:
    """How the prices came about."""
    if not case.gpus_usd_per_s:
        return []
    cost = case.fitted.cost
    token_s, rent = f"({as_term(cost.a_s)} + 0)", as_term(case.gpus_usd_per_s)
    first = usd_per_million_tokens(cost, 0.0, case.gpus_usd_per_s)
    formula = "(a + b*position)*USD a second"
    kv = as_term(case.kv_bytes_per_token)
    return [
        Work("usd_per_million_tokens_first", f"{formula}*1e6", f"{token_s}*{rent}*1e6", as_dollars(first)),
        *(
            Work(
                f"{keep.storage.name}: keep_first_s",
                f"{formula}/(kv*USD of a byte and second)",
                f"{token_s}*{rent}/({kv}*{keep.storage.usd_per_byte_s:.6g})",
                as_seconds(keep.first_s),
            )
            for keep in keeps
        ),
    ]
