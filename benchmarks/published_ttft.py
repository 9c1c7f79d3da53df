"""Do the calculator's numbers hold against times to the first token that others published?

data/published_ttft.csv, rows of quality A: single requests on named hardware. Rows of one source, model, GPU, count and tier
are a group: the constants are fitted to its shortest and longest context, as `kvstore break-even --measured ...
--measured-load ...` does, and the rows between are predicted. Nothing is measured here.
"""

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.harness import Goal, Report, Row, at_least, at_most, machine_card, show
from kvstore.calculator.break_even import answer_tier
from kvstore.calculator.fit import FittedPrefill, Point, fit_load, fit_prefill, unfitted
from kvstore.calculator.prefill_shape import PrefillShape, shape_of_row
from kvstore.calculator.priors import Setup, kernel_cost, prior
from kvstore.calculator.tier import Tier, host_memory
from kvstore.core.errors import ConfigError
from kvstore.tables import rows as tables

QUESTION = "Published times to the first token, predicted"
DATA = Path(__file__).parent / "data" / "published_ttft.csv"
MEDIAN_LIMIT, WORST_LIMIT, PRIOR_LIMIT, FORM_LIMIT = 0.10, 0.25, 0.25, 0.08
PAGE_BYTES = 16 * 32 * 128 * 2
"""Llama-2-7B's 16 tokens of K (or V) of a layer: what a store that copies page by page moves at once. 131,072 B."""


class Published(NamedTuple):
    """A row. Seconds are None where the source has none."""

    id: str
    source: str
    model: str
    gpu: str
    num_gpus: int
    tier: str
    context: int
    loaded: int
    recompute_s: float | None
    load_s: float | None
    moved_bytes: float
    moved_s: float | None  # a transfer alone, without any computing
    fetch_wins: bool | None


Key = tuple[str, str, str, int, str]


class Group(NamedTuple):
    """Rows of one set-up, by length."""

    shape: PrefillShape
    setup: Setup
    rows: Sequence[Published]


class Scored(NamedTuple):
    """One prediction. `kind`: recompute, load, transfer; `how`: fitted, between, expected."""

    row: Published
    kind: str
    how: str
    predicted_s: float
    published_s: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted_s / self.published_s - 1


class Sign(NamedTuple):
    """Whether fetching was published to win, and was predicted to."""

    row: Published
    published: bool
    predicted: bool
    fetch_s: float
    compute_s: float


def read(path: Path = DATA) -> list[Published]:
    """Rows of quality A."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_published(row) for row in csv.DictReader(file) if row["quality"] == "A"]


def _published(row: dict[str, str]) -> Published:
    recompute, load = _seconds(row["recompute_ttft_ms"]), _seconds(row["load_ttft_ms"])
    moved_bytes, rate = float(row["kv_GB_loaded"] or 0) * 1e9, float(row["bandwidth_GBps"] or 0) * 1e9
    is_transfer = load is None and rate > 0 and moved_bytes > 0
    # The source of P040 to P044 moved each byte twice: two ranks hold the same KV head.
    moved_s = 2 * moved_bytes / rate if is_transfer else None
    fetch_wins = None
    if row["note"].startswith("NEGATIVE"):
        fetch_wins = False
    elif recompute is not None and (load is not None or moved_s is not None):
        fetch_wins = (moved_s if load is None else load) < recompute  # type: ignore[operator]  # one of them is there
    return Published(
        id=row["id"],
        source=row["source"],
        model=row["model"],
        gpu=row["gpu"],
        num_gpus=int(row["n_gpu"] or 0),
        tier=row["tier"],
        context=int(row["context_tokens"] or 0),
        loaded=min(int(row["hit_tokens"] or 0), int(row["context_tokens"] or 0) - 1),
        recompute_s=recompute,
        load_s=load,
        moved_bytes=2 * moved_bytes if is_transfer else moved_bytes,
        moved_s=moved_s,
        fetch_wins=fetch_wins,
    )


def _seconds(text: str) -> float | None:
    return float(text) / 1e3 if text else None


def groups(found: Sequence[Published]) -> tuple[list[Group], list[Published]]:
    """The groups of known models on known GPUs, and the rows of others."""
    by_key: dict[Key, list[Published]] = {}
    for row in found:
        by_key.setdefault((row.source, row.model, row.gpu, row.num_gpus, row.tier), []).append(row)
    known, unknown = [], []
    for (_, model, gpu, num_gpus, _), members in by_key.items():
        try:
            shape, gpu_row = shape_of_row(tables.model(model)), tables.gpu(gpu)
        except ConfigError:
            unknown += members
            continue
        setup = Setup(shape, gpu_row, num_gpus)
        known.append(Group(shape, setup, sorted(members, key=lambda row: row.context)))
    return known, unknown


def score(group: Group) -> list[Scored]:
    """All predictions of a group: fitted to the ends where there are two, and expected without any fit."""
    expected = prior(group.setup)
    scored = [
        Scored(row, "recompute", "expected", unfitted(expected).prefill_s(row.context), row.recompute_s)
        for row in group.rows
        if row.recompute_s is not None
    ]
    computed = [Point(row.context, row.recompute_s) for row in group.rows if row.recompute_s is not None]
    if len({point.num_tokens for point in computed}) < 2:
        return scored
    fitted = fit_prefill([computed[0], computed[-1]], expected)
    timed = [row for row in group.rows if row.recompute_s is not None]
    scored += [
        Scored(row, "recompute", _how(row, timed), fitted.prefill_s(row.context), row.recompute_s or math.nan)
        for row in timed
    ]
    return scored + _score_loads(group, fitted)


def _score_loads(group: Group, fitted: FittedPrefill) -> list[Scored]:
    loads = [row for row in group.rows if row.load_s is not None]
    scored = []
    if len({row.context for row in loads}) >= 2:
        kv_bytes = group.shape.kv_bytes_per_token
        ends = [Point(row.context, row.load_s or math.nan, row.loaded) for row in (loads[0], loads[-1])]
        cost = fit_load(ends, kv_bytes, fitted)
        for row in loads:
            rest = row.context - row.loaded
            suffix_s = fitted.prefill_s(rest, row.loaded) if rest > 1 else 0.0
            scored.append(
                Scored(
                    row, "load", _how(row, loads), cost.load_s(kv_bytes * row.loaded) + suffix_s, row.load_s or math.nan
                )
            )
    moved = [row for row in group.rows if row.moved_s is not None]
    if len({row.context for row in moved}) >= 2:
        ends = [Point(row.moved_bytes, row.moved_s or math.nan, row.moved_bytes) for row in (moved[0], moved[-1])]
        cost = fit_load(ends, 1.0, fitted)
        scored += [
            Scored(row, "transfer", _how(row, moved), cost.load_s(row.moved_bytes), row.moved_s or math.nan)
            for row in moved
        ]
    return scored


def _how(row: Published, members: Sequence[Published]) -> str:
    return "fitted" if row in (members[0], members[-1]) else "between"


def signs(group: Group, scored: Sequence[Scored]) -> list[Sign]:
    """Of each row that says whether fetching won."""
    found = []
    for row in group.rows:
        if row.fetch_wins is None:
            continue
        mine = {entry.kind: entry.predicted_s for entry in scored if entry.row is row and entry.how != "expected"}
        if "recompute" in mine:
            fetch_s, compute_s = mine.get("load", mine.get("transfer", math.nan)), mine["recompute"]
        else:  # alone: by what is expected
            answer = answer_tier(
                prior(group.setup).cost, _expected_tier(group), group.shape.kv_bytes_per_token, row.context
            )
            fetch_s, compute_s = answer.fetch_s, answer.compute_s
        found.append(Sign(row, row.fetch_wins, fetch_s < compute_s, fetch_s, compute_s))
    return found


def _expected_tier(group: Group) -> Tier:
    """Host memory, copied page by page: the stores of that time did."""
    return host_memory(group.setup.gpu, group.setup.num_gpus, PAGE_BYTES)


def form_errors() -> list[float]:
    """MFU at 8,192 tokens of each row of prefill_eta.csv, from its t0 and efficiencies, against the one that the kernels have."""
    errors = []
    with (Path(tables.__file__).parent / "prefill_eta.csv").open(newline="", encoding="utf-8") as file:
        published = [float(row["mfu_8192"]) for row in csv.DictReader(file)]
    for row, mfu in zip(tables.efficiencies(), published, strict=True):
        setup = Setup(shape_of_row(tables.model(row.model)), tables.gpu(row.gpu), row.num_gpus)
        shape, peak = setup.shape, row.peak_flops_per_s * row.num_gpus
        seen = min(8192, shape.window_tokens)
        flops = 2 * shape.prefill_params * 8192 + shape.attn_flops_per_pair * 8192**2 / 2
        flops += shape.window_flops_per_pair * seen * (8192 - seen / 2)
        errors.append(flops / peak / kernel_cost(setup, row).prefill_s(8192) / mfu - 1)
    return errors


def run(path: Path = DATA) -> Report:
    known, unknown = groups(read(path))
    scored, told = [], []
    for group in known:
        mine = score(group)
        scored += mine
        told += signs(group, mine)
    return Report(
        question=QUESTION,
        command="python -m benchmarks.published_ttft",
        rows=[_row(entry) for entry in scored],
        goals=goals(scored, told, known),
        remarks=remarks(scored, told, unknown),
    )


def goals(scored: Sequence[Scored], told: Sequence[Sign], known: Sequence[Group]) -> list[Goal]:
    between = [abs(entry.error) for entry in scored if entry.how == "between"]
    dense = {group.shape.name for group in known if group.shape.is_dense}
    expected = [
        abs(entry.error) for entry in scored if entry.how == "expected" and tables.model(entry.row.model).name in dense
    ]
    form = [abs(error) for error in form_errors()]
    return [
        at_most("error between the fitted ends, median", round(statistics.median(between), 4), MEDIAN_LIMIT),
        at_most("error between the fitted ends, worst", round(max(between), 4), WORST_LIMIT),
        at_most(
            "error of recompute of dense models, nothing fitted, median",
            round(statistics.median(expected), 4),
            PRIOR_LIMIT,
        ),
        at_least(
            "rows with fetch wins or loses told right, part",
            sum(s.published == s.predicted for s in told) / len(told),
            1.0,
        ),
        at_most(
            "MFU at 8,192 tokens by t0 and efficiencies against the kernels', worst error",
            round(max(form), 4),
            FORM_LIMIT,
        ),
    ]


def remarks(scored: Sequence[Scored], told: Sequence[Sign], unknown: Sequence[Published]) -> list[str]:
    worst = max((entry for entry in scored if entry.how == "between"), key=lambda entry: abs(entry.error))
    expected = max((entry for entry in scored if entry.how == "expected"), key=lambda entry: abs(entry.error))
    lost = [
        f"{s.row.id} ({s.row.model}: {s.fetch_s * 1e3:.0f} ms to fetch, {s.compute_s * 1e3:.0f} to compute)"
        for s in told
        if not s.published
    ]
    pages = f"{PAGE_BYTES / 1024:.0f} KiB"
    wins = f"{len(told)} rows say whether fetching won; it lost in {', '.join(lost)}"
    between = f"{worst.row.id}, {worst.row.model}, {worst.kind}, {worst.error:+.1%}"
    alone = f"{expected.row.id}, {expected.row.model} on {expected.row.num_gpus} x {expected.row.gpu}, {expected.error:+.1%}"
    layout = "in large copies it would have won: that row tells a layout from another, not a tier"
    return [
        f"{wins}: 512 KiB of KV a token, copied in pages of {pages}, for which a link of 44 GB/s gives 19; {layout}",
        f"the worst between the ends: {between}: MLA's KV is small, a load is mostly latency, and that grew with the length",
        f"the worst that nothing was fitted to: {alone}: what experts cost beside their FLOPs is known from other GPUs only",
        f"not scored, as their model is not in models.csv: {', '.join(row.id for row in unknown)}",
        "with nothing fitted, the 8B rows are no independent test: the engine's overhead of 1.10 was seen on them (QwQ's are)",
        "fitted rows are the two ends, from which the constants are; transfers are KV moved between GPUs, without computing",
    ]


def _row(entry: Scored) -> Row:
    row = entry.row
    return {
        "id": row.id,
        "set_up": f"{row.model}, {row.num_gpus} x {row.gpu}",
        "what": f"{entry.kind}, {entry.how}",
        "tokens": row.context,
        "published_ms": round(entry.published_s * 1e3, 1),
        "predicted_ms": round(entry.predicted_s * 1e3, 1),
        "error_percent": round(entry.error * 100, 1),
    }


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=DATA,
    help="Other rows of that form.",
)
@click.option("--json", "as_json", is_flag=True)
def main(*, data: Path, as_json: bool) -> None:
    show(run(data), machine_card(), as_json=as_json)


if __name__ == "__main__":
    main()
