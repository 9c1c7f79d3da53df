"""`kvstore size`: how much memory a trace, a recording, or a running sidecar's traffic is worth."""

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from kvstore.calculator.break_even import MONTH_S
from kvstore.calculator.plots import Series, check_plot, plot_lines
from kvstore.cli.finite import POSITIVE, SECONDS
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Value,
    as_bytes,
    as_count,
    as_dollars,
    as_percent,
    output_options,
    write,
)
from kvstore.config import format_size, parse_size
from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.proto import kvstore_pb2 as pb
    from kvstore.replay.costs import ReplayCosts
    from kvstore.replay.trace import Trace
    from kvstore.reuse_curve import ReuseCurve

_COUNT = click.IntRange(min=1)
_LADDER = tuple(step * 10**power for power in range(2, 7) for step in (1, 3))
_BYTES_LADDER = tuple(1 << power for power in range(20, 48))


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--live", is_flag=True, help="Ask the running sidecar, in place of a trace.")
@click.option("--socket", help="Path of the sidecar's local socket, with --live.  [default: as for serve]")
@click.option("--deadline-s", type=SECONDS, default=5.0, show_default=True, help="For its answer.")
@click.option("--exact", is_flag=True, help="Follow every block, not a sample.")
@click.option(
    "--capacity",
    metavar="BLOCKS,BLOCKS",
    help="Sizes to show; of a recording and of live traffic such as 8GiB,1TiB.  [default: as far as it rises]",
)
@click.option("--block-tokens", type=_COUNT, default=512, show_default=True, help="What a hash id stands for.")
@click.option("--full-blocks", is_flag=True, help="Without the last block of a prompt if it is not full.")
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first requests.  [default: all]")
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="For bytes and dollars.")
@click.option("--gpu", default="H100", show_default=True)
@click.option("--num-gpus", type=_COUNT, default=1, show_default=True)
@click.option("--ram-usd", type=POSITIVE, default=2.29, show_default=True, help="Price of a GB-month of RAM.")
@click.option("--nvme-usd", type=POSITIVE, default=0.08, show_default=True, help="Price of a GB-month of NVMe.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="The curve: .png or .html.")
@output_options
def size(
    *,
    trace: Path | None,
    live: bool,
    socket: str | None,
    deadline_s: float,
    exact: bool,
    capacity: str | None,
    block_tokens: int,
    full_blocks: bool,
    limit: int,
    model: str,
    gpu: str,
    num_gpus: int,
    ram_usd: float,
    nvme_usd: float,
    plot: Path | None,
    form: Form,
) -> None:
    """The hit rate of every capacity on TRACE under LRU, where more stops to help, and what it costs and saves.

    One pass for all capacities, from how far apart uses lie: of every block (--exact), or of 4,096 that are chosen by hash.
    TRACE is in Mooncake's format, or what a sidecar recorded; --live asks a sidecar for the curve that it keeps of its own
    traffic. What is saved is the cost model's for --model and --gpu; of live traffic, what was measured of the tokens hit.
    """
    if live == (trace is not None):
        raise ConfigError("trace: give one, or --live", field="trace", value=str(trace or ""))
    if plot is not None:
        check_plot(plot)
    from kvstore.replay.costs import make_costs

    costs = make_costs(model, gpu, num_gpus)
    if trace is None:
        found = _of_sidecar(socket, deadline_s, costs)
    else:
        from kvstore.replay.recording import read_requests

        requests = read_requests(trace, block_tokens=block_tokens, limit=limit, full_blocks=full_blocks)
        found = _of_trace(requests, costs, block_tokens=block_tokens, exact=exact)
    write(_report(found, costs, _capacities(capacity, found), ram_usd=ram_usd, nvme_usd=nvme_usd), form)
    if plot is not None:
        points = [(at, 100 * rate) for at, rate in found.points]
        title = "live" if trace is None else trace.name
        plot_lines(plot, [Series("LRU", points)], title=title, x_label=found.unit, y_label="hits, %", log_x=True)


class _Curve(NamedTuple):
    """What there is to tell of, in blocks of one size or in bytes."""

    unit: str  # blocks | bytes
    unit_nbytes: float
    hit: str  # what the hit rate counts: block_hit | token_hit
    hit_rates: Callable[[Sequence[float]], Sequence[float]]
    points: Sequence[tuple[float, float]]  # where it rises: capacity, hit rate
    sizes: Sequence[int]  # to show
    work_usd_per_h: float | None  # of all that could be saved; None: nobody measured it
    figures: Sequence[Figure]


def _of_trace(trace: "Trace", costs: "ReplayCosts", *, block_tokens: int, exact: bool) -> _Curve:
    """A recording knows the sizes of its blocks; a trace's have the size that they would have with the model."""
    from kvstore.replay.curve import recording_curve, trace_curve

    requests = trace.requests
    hours = max(requests[-1].at_s - requests[0].at_s, 1.0) / 3600
    work_s = sum(costs.prefill.work_s(request.num_tokens) for request in requests)
    counts = [
        Figure("requests", "requests", len(requests), as_count),
        Figure("blocks", "blocks wanted", trace.num_references, as_count),
        Figure("distinct_blocks", "distinct blocks", trace.num_blocks, as_count),
    ]
    if trace.recorded is None:
        curve, unit_nbytes = trace_curve(trace, exact=exact), block_tokens * costs.kv_bytes_per_token
        unit, hit, scale, ladder = "blocks", "block_hit", 1, _LADDER
    else:
        curve, scale = recording_curve(trace, exact=exact)
        unit, hit, unit_nbytes, ladder = "bytes", "token_hit", 1.0, _BYTES_LADDER
    points = [(point.capacity * scale, point.hit_rate) for point in curve.points()]
    largest = points[-1][0] if points else 0.0
    figures = [
        *counts,
        *_curve_figures(curve, unit_nbytes * scale, hit),
        Figure("hours", "hours of traffic", hours, _short),
    ]
    return _Curve(
        unit=unit,
        unit_nbytes=unit_nbytes,
        hit=hit,
        hit_rates=lambda sizes: curve.hit_rates([each / scale for each in sizes]),
        points=points,
        sizes=[step for step in ladder if step <= 2 * largest] or [ladder[0]],
        work_usd_per_h=work_s * costs.gpus_usd_per_s / hours,
        figures=figures,
    )


def _of_sidecar(socket: str | None, deadline_s: float, costs: "ReplayCosts") -> _Curve:
    import numpy as np

    from kvstore.client import Client
    from kvstore.proto import kvstore_pb2 as pb

    with Client(socket, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s) as client:
        stats = client.stats()
    curve = stats.capacity_curve
    sizes, rates = list(curve.bytes), list(curve.hit_rates)

    def rates_of(wanted: Sequence[float]) -> Sequence[float]:
        if not rates:
            return [0.0] * len(wanted)
        for each in wanted:
            if not sizes[0] <= each <= sizes[-1]:
                right = (
                    f"sizes from {format_size(ceil(sizes[0]))} to {format_size(int(sizes[-1]))}, which its curve has"
                )
                raise ConfigError(f"--capacity: {each} bytes; use {right}", field="capacity", value=each)
        return np.interp(np.log2(wanted), np.log2(sizes), rates).tolist()  # type: ignore[no-any-return]

    named = {each.capacity: each for each in curve.capacities}
    figures = [
        Figure("requested_tokens", "tokens it rests on", round(curve.requested_tokens), as_count),
        Figure("best_token_hit", "hit rate without end", named["endless"].hit_rate, as_percent),
        Figure("followed_part", "part of the blocks followed", curve.followed_part, as_percent),
        Figure("words", "in words", curve.words),
    ]
    return _Curve(
        unit="bytes",
        unit_nbytes=1.0,
        hit="token_hit",
        hit_rates=rates_of,
        points=list(zip(curve.bytes, rates, strict=True)),
        sizes=sorted({each.bytes for each in curve.capacities if each.bytes}),
        work_usd_per_h=_measured_usd_per_h(stats, costs),
        figures=figures,
    )


def _measured_usd_per_h(stats: "pb.StatsReply", costs: "ReplayCosts") -> float | None:
    """Of computing all that is asked for: requested tokens an hour, each as dear as those that were hit were measured to be."""
    usage, saved_s = stats.usage, stats.seconds.get("saved_prefill", 0.0)
    hits = sum(tokens for tier, tokens in usage.hit_tokens.items() if tier != "hbm")
    if not (hits and saved_s and stats.uptime_s):
        return None
    tokens_per_h = usage.requested_tokens / stats.uptime_s * 3600
    return tokens_per_h * saved_s / hits * costs.gpus_usd_per_s


def _curve_figures(curve: "ReuseCurve", unit_nbytes: float, hit: str) -> list[Figure]:
    knee = curve.knee()
    best = Figure(f"best_{hit}", "hit rate without end", curve.best_hit_rate(), as_percent)
    at = [
        Figure(
            "knee_nbytes", "knee of the curve, bytes", None if knee is None else knee.capacity * unit_nbytes, as_bytes
        ),
        Figure(f"knee_{hit}", "hit rate there", None if knee is None else knee.hit_rate, as_percent),
    ]
    if hit == "block_hit":
        blocks = None if knee is None else round(knee.capacity)
        at.insert(0, Figure("knee_blocks", "knee of the curve, blocks", blocks, as_count))
    return [best, *at, Figure("followed_part", "part of the blocks followed", curve.rate, as_percent)]


def _capacities(text: str | None, curve: _Curve) -> Sequence[int]:
    """Those that were asked for, or those that the curve has to show."""
    if text is None:
        return curve.sizes
    parts, in_bytes = [part.strip() for part in text.split(",")], curve.unit == "bytes"
    try:
        sizes = [parse_size(part) if in_bytes else int(part) for part in parts]
    except ValueError:
        sizes = [0]
    if min(sizes) <= 0:
        right = "sizes, such as 8GiB,64GiB" if in_bytes else "blocks, such as 1000,3000,10000"
        raise ConfigError(f"--capacity: {text!r}; use {right}", field="capacity", value=text)
    return sizes


def _report(curve: _Curve, costs: "ReplayCosts", sizes: Sequence[int], *, ram_usd: float, nvme_usd: float) -> Report:
    rows: list[dict[str, Value]] = []
    for capacity, hit in zip(sizes, curve.hit_rates(sizes) if sizes else (), strict=True):
        nbytes = capacity * curve.unit_nbytes
        per_hour = nbytes / 1e9 / (MONTH_S / 3600)
        ram, nvme = per_hour * ram_usd, per_hour * nvme_usd
        saved = None if curve.work_usd_per_h is None else hit * curve.work_usd_per_h
        best = None if saved is None else max((0.0, "none"), (saved - ram, "RAM"), (saved - nvme, "NVMe"))[1]
        rows.append(
            {
                "capacity": capacity,
                "nbytes": nbytes,
                curve.hit: hit,
                "saved_usd_per_h": saved,
                "ram_usd_per_h": ram,
                "nvme_usd_per_h": nvme,
                "best": best,
            }
        )
    columns = [
        Column("capacity", "blocks" if curve.unit == "blocks" else "", as_count),
        Column("nbytes", "bytes", as_bytes),
        Column(curve.hit, curve.hit.replace("_", " "), as_percent),
        Column("saved_usd_per_h", "saved/h", as_dollars),
        Column("ram_usd_per_h", "RAM/h", as_dollars),
        Column("nvme_usd_per_h", "NVMe/h", as_dollars),
        Column("best", "pays most"),
    ]
    head = f"{costs.model} on {costs.num_gpus} x {costs.gpu}; saved: GPU time, as if every {curve.hit[:5]} cost alike"
    return Report(curve.figures, tables=[Rows("sizes", columns, rows)], head=head)


def _short(value: float) -> str:
    return f"{value:.3g}"
