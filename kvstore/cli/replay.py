"""`kvstore replay`: what a trace would have hit."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvstore.calculator.plots import Series, check_plot, plot_lines
from kvstore.cli.finite import FiniteRange
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    as_bytes,
    as_count,
    as_dollars,
    as_percent,
    as_seconds,
    output_options,
    write,
)
from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.replay.capacity import Capacity
    from kvstore.replay.costs import ReplayCosts
    from kvstore.replay.run import Result
    from kvstore.replay.trace import Recorded, Trace

_COUNT = click.IntRange(min=1)
_WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
_PLOT_POINTS = 2


@click.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", "policy", metavar="NAME", help="Eviction policy.  [default: the recorded one, or adaptive]")
@click.option("--compare", metavar="NAME,NAME", help="Several policies; `all`: every one.")
@click.option("--capacity", metavar="BLOCKS|SIZE", help="What RAM holds.  [default: what the recorded arena did]")
@click.option("--sweep", metavar="BLOCKS,BLOCKS", help="Several capacities.")
@click.option("--nvme", metavar="BLOCKS|SIZE", help="What a drive below holds.  [default: no drive]")
@click.option("--write-policy", type=click.Choice(_WRITE_POLICIES), default="write_through", show_default=True)
@click.option("--tenant-quota", type=FiniteRange(0, 1, min_open=True), help="[default: the recorded one, or 1]")
@click.option("--block-tokens", type=_COUNT, default=512, show_default=True, help="What a hash id stands for.")
@click.option("--full-blocks", is_flag=True, help="Without the last block of a prompt if it is not full.")
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first requests.  [default: all]")
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="For TTFT and dollars.")
@click.option("--gpu", default="H100", show_default=True)
@click.option("--num-gpus", type=_COUNT, default=1, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Hit rate over capacity: .png or .html.")
@click.option("--progress/--no-progress", default=None, help="Show progress.  [default: on a terminal]")
@output_options
def replay(
    *,
    trace: Path,
    policy: str | None,
    compare: str | None,
    capacity: str | None,
    sweep: str | None,
    nvme: str | None,
    write_policy: str,
    tenant_quota: float | None,
    block_tokens: int,
    full_blocks: bool,
    limit: int,
    model: str,
    gpu: str,
    num_gpus: int,
    plot: Path | None,
    progress: bool | None,
    form: Form,
) -> None:
    """Replay TRACE (Mooncake's format, .gz or not, or what a sidecar recorded) through the store's own index and policies.

    Nothing is computed. In a trace blocks are stored as soon as they are wanted; a recording says what was stored when, and
    how large blocks are, so that a capacity may be a size such as 8GiB. TTFT, GPU seconds and dollars are the cost model's.
    """
    if plot is not None:
        check_plot(plot)
        if len((sweep or "").split(",")) < _PLOT_POINTS:
            raise ConfigError(
                "--plot: needs two capacities; use --sweep 1000,3000,10000", field="plot", value=str(plot)
            )
    from kvstore.eviction import DEFAULT_POLICY
    from kvstore.replay.costs import make_costs
    from kvstore.replay.recording import read_requests

    named = _policies(policy, compare)
    costs = make_costs(model, gpu, num_gpus)
    requests = read_requests(trace, block_tokens=block_tokens, limit=limit, full_blocks=full_blocks)
    recorded = requests.recorded
    capacities = _capacities(capacity, sweep, recorded)
    policies = named or _policies(recorded.eviction if recorded else DEFAULT_POLICY, None)
    results = _run_all(
        requests,
        list(itertools.product(policies, capacities)),
        costs,
        nvme=_nvme(nvme, capacities, recorded),
        write_policy=write_policy,
        tenant_quota=tenant_quota or (recorded.tenant_quota if recorded else 1.0),
        progress=progress,
    )
    write(_single(results[0], costs) if len(results) == 1 else _table(results, costs), form)
    if plot is not None:
        lines = [
            Series(name, [(r.capacity, 100 * r.block_hit) for r in results if r.policy == name], marks=True)
            for name in policies
        ]
        plot_lines(plot, lines, title=str(trace.name), x_label="blocks", y_label="block hits, %", log_x=True)


def _policies(policy: str | None, compare: str | None) -> list[str]:
    """Those that were named."""
    from kvstore.eviction import POLICIES

    if policy is not None and compare is not None:
        raise ConfigError("--policy: given with --compare; use one of the two", field="policy", value=policy)
    names = list(POLICIES) if compare == "all" else (compare or policy or "").split(",")
    for name in names if compare or policy else ():
        if name not in POLICIES:
            option = "policy" if compare is None else "compare"
            raise ConfigError(f"--{option}: {name!r}; use {', '.join(POLICIES)}", field=option, value=name)
    return list(dict.fromkeys(names)) if compare or policy else []


def _capacities(capacity: str | None, sweep: str | None, recorded: "Recorded | None") -> "list[Capacity]":
    from kvstore.replay.capacity import Capacity, read_capacity

    if capacity is None and sweep is None and recorded is not None:
        return [Capacity(recorded.arena_bytes, recorded.segment_bytes)]
    if (capacity is None) == (sweep is None):
        raise ConfigError("--capacity: give it, in blocks, or --sweep with several", field="capacity", value="")
    if capacity is not None:
        return [read_capacity(capacity, "capacity", recorded)]
    found = [read_capacity(part, "sweep", recorded) for part in (sweep or "").split(",")]
    if len({each.in_bytes for each in found}) > 1:
        raise ConfigError(f"--sweep: {sweep!r}; use blocks or sizes, not both", field="sweep", value=sweep or "")
    return found


def _nvme(text: str | None, capacities: "Sequence[Capacity]", recorded: "Recorded | None") -> "Capacity | None":
    from kvstore.replay.capacity import read_capacity

    if text is None or text == "0":
        return None
    nvme = read_capacity(text, "nvme", recorded)
    if nvme.in_bytes != capacities[0].in_bytes:
        raise ConfigError(f"--nvme: {text!r}; use what --capacity has, blocks or a size", field="nvme", value=text)
    return nvme


def _run_all(
    trace: "Trace",
    cases: "Sequence[tuple[str, Capacity]]",
    costs: "ReplayCosts",
    *,
    nvme: "Capacity | None",
    write_policy: str,
    tenant_quota: float,
    progress: bool | None,
) -> "list[Result]":
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.eviction import make_policy
    from kvstore.replay.cache import ReplayCache
    from kvstore.replay.run import Replayed, Result
    from kvstore.replay.run import replay as run
    from kvstore.replay.two_tiers import TwoTiers
    from kvstore.spill import SpillPolicy, WritePolicy

    results: list[Result] = []
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    with Progress(console=console, transient=True, disable=not shown) as bar:
        for name, capacity in cases:
            unit = "bytes" if capacity.in_bytes else "blocks"
            task = bar.add_task(f"{name}, {capacity.amount:,} {unit}", total=len(trace.steps))
            make = make_policy(name, tenant_quota=tenant_quota)
            cache: Replayed
            if nvme is not None:
                spill = SpillPolicy(cast("WritePolicy", write_policy))
                cache = TwoTiers(capacity.slots(), nvme.drive(), make, spill)
            else:
                cache = ReplayCache(capacity.slots(), make, by_time=trace.recorded is not None)
            below = 0 if nvme is None else nvme.amount
            result = Result(policy=name, capacity=capacity.amount, in_bytes=capacity.in_bytes, nvme_capacity=below)
            results.append(run(trace, cache, result, costs, lambda count, task=task: bar.advance(task, count)))  # type: ignore[misc]
            bar.remove_task(task)
    return results


def _single(result: "Result", costs: "ReplayCosts") -> Report:
    none = result.ttfts_s == []
    unit, size = ("bytes", as_bytes) if result.in_bytes else ("blocks", as_count)
    figures = [
        Figure("policy", "policy", result.policy),
        Figure("capacity", f"RAM, {unit}", result.capacity, size),
        Figure("nvme_capacity", f"NVMe, {unit}", result.nvme_capacity, size),
        Figure("requests", "requests", result.requests, as_count),
        Figure("blocks", "blocks wanted", result.blocks, as_count),
        Figure("hits", "blocks hit", result.hits, as_count),
        Figure("block_hit", "hit rate by blocks", result.block_hit, as_percent),
        Figure("token_hit", "hit rate by tokens", result.token_hit, as_percent),
        Figure("ram_hits", "hit in RAM", result.ram_hits, as_count),
        Figure("nvme_hits", "hit on NVMe", result.nvme_hits, as_count),
        Figure("hit_tokens", "tokens hit", result.hit_tokens, as_count),
        Figure("ram_hit_tokens", "tokens hit in RAM", result.ram_hit_tokens, as_count),
        Figure("nvme_hit_tokens", "tokens hit on NVMe", result.nvme_hit_tokens, as_count),
        Figure("evicted_blocks", "evicted from RAM", result.evicted, as_count),
        Figure("nvme_written_blocks", "written to NVMe", result.nvme_written, as_count),
        Figure("saved_part", "prefill work saved", result.saved_part, as_percent),
        Figure("saved_gpu_s", "GPU seconds saved", result.saved_gpu_s * costs.num_gpus, as_seconds),
        Figure("saved_usd", "dollars saved", result.saved_gpu_s * costs.gpus_usd_per_s, as_dollars),
        *(
            Figure(
                f"ttft_p{percent}_s", f"TTFT p{percent}, unqueued", None if none else result.ttft_s(percent), as_seconds
            )
            for percent in (50, 90, 99)
        ),
    ]
    return Report(figures, head=_deployment(costs))


def _table(results: "Sequence[Result]", costs: "ReplayCosts") -> Report:
    columns = [
        Column("policy", "policy"),
        Column("capacity", "bytes", as_bytes) if results[0].in_bytes else Column("capacity", "blocks", as_count),
        Column("block_hit", "block hit", as_percent),
        Column("token_hit", "token hit", as_percent),
        Column("saved_part", "work saved", as_percent),
        Column("saved_usd", "saved", as_dollars),
        Column("ttft_p50_s", "TTFT p50", as_seconds),
        Column("ttft_p99_s", "" if results[0].nvme_capacity else "TTFT p99", as_seconds),
        Column("nvme_written_blocks", "NVMe writes" if results[0].nvme_capacity else "", as_count),
    ]
    rows = []
    for result in results:
        values = {figure.name: figure.value for figure in _single(result, costs).figures}
        rows.append(values)
    return Report(tables=[Rows("runs", columns, rows)], head=_deployment(costs))


def _deployment(costs: "ReplayCosts") -> str:
    return f"{costs.model} on {costs.num_gpus} x {costs.gpu}; work saved: hits weighted by their prefill seconds"
