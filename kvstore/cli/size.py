"""`kvstore size`: how much memory a trace is worth."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.calculator.break_even import MONTH_S
from kvstore.calculator.plots import Series, check_plot, plot_lines
from kvstore.cli.finite import POSITIVE
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
from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.replay.costs import ReplayCosts
    from kvstore.replay.trace import Trace
    from kvstore.reuse_curve import ReuseCurve

_COUNT = click.IntRange(min=1)
_LADDER = tuple(step * 10**power for power in range(2, 7) for step in (1, 3))


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--exact", is_flag=True, help="Follow every block, not a sample.")
@click.option(
    "--capacity", metavar="BLOCKS,BLOCKS", help="Sizes to show.  [default: 100 to 3,000,000, as far as it rises]"
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
    trace: Path,
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
    """
    if plot is not None:
        check_plot(plot)
    from kvstore.replay.costs import make_costs
    from kvstore.replay.curve import trace_curve
    from kvstore.replay.trace import read_trace

    costs = make_costs(model, gpu, num_gpus)
    wanted = _capacities(capacity)
    requests = read_trace(trace, block_tokens=block_tokens, limit=limit, full_blocks=full_blocks)
    curve = trace_curve(requests, exact=exact)
    write(_report(requests, curve, costs, wanted, ram_usd=ram_usd, nvme_usd=nvme_usd), form)
    if plot is not None:
        points = [(point.capacity, 100 * point.hit_rate) for point in curve.points()]
        series = [Series("LRU", points)]
        plot_lines(plot, series, title=trace.name, x_label="blocks", y_label="block hits, %", log_x=True)


def _capacities(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--capacity: {text!r}; use blocks, such as 1000,3000,10000", field="capacity", value=text)
    return [int(part) for part in parts]


def _report(
    trace: "Trace",
    curve: "ReuseCurve",
    costs: "ReplayCosts",
    wanted: Sequence[int],
    *,
    ram_usd: float,
    nvme_usd: float,
) -> Report:
    block_nbytes = trace.block_tokens * costs.kv_bytes_per_token
    hours = max(trace.requests[-1].at_s - trace.requests[0].at_s, 1.0) / 3600
    work_usd = (
        sum(costs.prefill.work_s(request.num_tokens) for request in trace.requests) * costs.gpus_usd_per_s / hours
    )
    points = curve.points()
    largest = points[-1].capacity if points else 0.0
    sizes = wanted or [step for step in _LADDER if step <= 2 * largest] or [_LADDER[0]]
    rows: list[dict[str, Value]] = []
    for num_blocks in sizes:
        nbytes = num_blocks * block_nbytes
        hit = curve.hit_rate(num_blocks)
        per_hour = nbytes / 1e9 / (MONTH_S / 3600)
        saved, ram, nvme = hit * work_usd, per_hour * ram_usd, per_hour * nvme_usd
        best = max((0.0, "none"), (saved - ram, "RAM"), (saved - nvme, "NVMe"))[1]
        rows.append(
            {
                "capacity": num_blocks,
                "nbytes": nbytes,
                "block_hit": hit,
                "saved_usd_per_h": saved,
                "ram_usd_per_h": ram,
                "nvme_usd_per_h": nvme,
                "best": best,
            }
        )
    knee = curve.knee()
    figures = [
        Figure("requests", "requests", len(trace.requests), as_count),
        Figure("blocks", "blocks wanted", curve.total, as_count),
        Figure("distinct_blocks", "distinct blocks", trace.num_blocks, as_count),
        Figure("best_block_hit", "hit rate without end", curve.best_hit_rate(), as_percent),
        Figure("knee_blocks", "knee of the curve, blocks", None if knee is None else round(knee.capacity), as_count),
        Figure("knee_nbytes", "in bytes", None if knee is None else knee.capacity * block_nbytes, as_bytes),
        Figure("knee_block_hit", "hit rate there", None if knee is None else knee.hit_rate, as_percent),
        Figure("followed_part", "part of the blocks followed", curve.rate, as_percent),
        Figure("hours", "hours of traffic", hours, lambda value: f"{value:.3g}"),
    ]
    columns = [
        Column("capacity", "blocks", as_count),
        Column("nbytes", "bytes", as_bytes),
        Column("block_hit", "block hit", as_percent),
        Column("saved_usd_per_h", "saved/h", as_dollars),
        Column("ram_usd_per_h", "RAM/h", as_dollars),
        Column("nvme_usd_per_h", "NVMe/h", as_dollars),
        Column("best", "pays most"),
    ]
    head = f"{costs.model} on {costs.num_gpus} x {costs.gpu}; saved: GPU time, as if every block cost alike"
    return Report(figures, tables=[Rows("sizes", columns, rows)], head=head)
