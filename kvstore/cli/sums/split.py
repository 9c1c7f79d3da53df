"""`kvstore break-even split`: prefill here, decode there: is the KV's way between them noticed?"""

from typing import Any, NamedTuple

import click

from kvstore.calculator.prefill_split import Transfer, hiding_bandwidth, transfer
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Work,
    as_bandwidth,
    as_bytes,
    as_count,
    as_number,
    as_percent,
    as_seconds,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import COUNT, POSITIVE, Link, efficiency, link
from kvstore.cli.sums.inputs import GpuNumbers, ModelNumbers, gpu_options, model_options, need
from kvstore.cli.sums.prefill import prefill_cost
from kvstore.costs import PrefillCost

_DEFAULT_LINKS = ("25 GbE TCP", "100 GbE/EDR RDMA", "400G NDR/RoCE")
_COLUMNS = (
    Column("name", "link"),
    Column("bytes_per_s", "rate", as_bandwidth),
    Column("transfer_s", "transfer", as_seconds),
    Column("exposed_s", "exposed", as_seconds),
    Column("hides", "hides", lambda hides: "yes" if hides else "no"),
    Column("ttft_s", "TTFT", as_seconds),
    Column("link_share", "link used", as_percent),
    Column("max_requests_per_s", ""),
    Column("keeps_up", ""),
    Column("ttft_unhidden_s", ""),
    Column("latency_s", ""),
)


class _Case(NamedTuple):
    nbytes: float
    prefill_s: float
    layers: int
    requests_per_s: float


@click.command(short_help="Prefill and decode apart: the KV's way.")
@model_options
@gpu_options
@click.option("--context", "num_tokens", type=COUNT, default=8192, show_default=True, help="Tokens of a prompt.")
@click.option(
    "--link",
    "links",
    type=link,
    multiple=True,
    metavar="NAME=GB/s,ms",
    help="Or a rate (400Gb/s), or a device of the table; several times.  [default: three NICs of the table]",
)
@click.option("--prefill-ms", type=POSITIVE, help="Measured.  [default: predicted by --model and --gpu]")
@click.option(
    "--efficiency", type=efficiency, help="Shares of the peak that GEMMs and attention reach; no overhead then."
)
@click.option("--requests-per-s", type=POSITIVE, help="Of one prefill machine.  [default: it is never idle]")
@output_options
def split(
    *,
    model: ModelNumbers,
    gpu: GpuNumbers,
    num_tokens: int,
    links: tuple[Link, ...],
    prefill_ms: float | None,
    efficiency: tuple[float, float] | None,
    requests_per_s: float | None,
    form: Form,
) -> None:
    """Transfer time of a prompt's KV from a prefill to a decode machine, whether it hides behind the prefill when it is
    sent layer by layer, and what the link must sustain.

    \b
    Example:
      kvstore break-even split --model Llama-3.1-8B --gpu H100 --link 400Gb/s
    """
    kv_bytes = need(model.kv_bytes_per_token, "KV of a token", "--kv-bytes-per-token", by_name="--model")
    layers = need(model.layers, "the KV is sent layer by layer", "--layers", by_name="--model")
    work: list[Work] = []
    if prefill_ms is not None:
        prefill_s = prefill_ms / 1e3
        work.append(Work("T", "as measured", "", as_seconds(prefill_s)))
    else:
        cost = prefill_cost(model, gpu, efficiency, work, otherwise="--prefill-ms MS")
        prefill_s = cost.prefill_s(num_tokens)
        work.append(_prefill_work(cost, num_tokens))
    nbytes = kv_bytes * num_tokens
    work.append(
        Work("bytes", "tokens * KV bytes of a token", f"{num_tokens} * {as_term(kv_bytes)}", f"{as_term(nbytes)} B")
    )
    needed = hiding_bandwidth(nbytes, prefill_s)
    work.append(Work("B to hide", "bytes / T", f"{as_term(nbytes)} / {as_term(prefill_s)}", as_bandwidth(needed)))
    rate = requests_per_s or 1 / prefill_s
    if requests_per_s is None:
        work.append(
            Work(
                "requests/s", "1 / T: a prefill machine that is never idle", f"1 / {as_term(prefill_s)}", as_term(rate)
            )
        )
    sustained = rate * nbytes
    work.append(
        Work("link traffic", "requests/s * bytes", f"{as_term(rate)} * {as_term(nbytes)}", as_bandwidth(sustained))
    )
    case = _Case(nbytes, prefill_s, layers, rate)
    rows = []
    for one in links or [link(name) for name in _DEFAULT_LINKS]:
        found = transfer(one.cost, *case)
        rows.append(_row(one, found, prefill_s))
        work += _work(one, found, case)
    figures = [
        Figure("context_tokens", "tokens of a prompt", num_tokens, as_count),
        Figure("kv_bytes", "its KV", nbytes, as_bytes),
        Figure("prefill_s", "its prefill T", prefill_s, as_seconds),
        Figure("hiding_bytes_per_s", "bandwidth that hides it", needed, as_bandwidth),
        Figure("requests_per_s", "requests/s", rate, as_number),
        Figure("traffic_bytes_per_s", "traffic at that rate", sustained, as_bandwidth),
    ]
    notes = [
        f"{row['name']}: {as_percent(rate / row['max_requests_per_s'])} of the link asked for: requests queue up"
        for row in rows
        if not row["keeps_up"]
    ]
    over = rate * prefill_s
    if over > 1 + 1e-9:
        notes.append(f"{as_number(rate)} requests/s need {as_number(over)} prefill machines that never rest")
    write(
        Report(figures, [Rows("links", _COLUMNS, rows)], work, notes, head=f"{model.name}: prefill apart from decode"),
        form,
    )


def _prefill_work(cost: PrefillCost, num_tokens: int) -> Work:
    n, seen = num_tokens, min(num_tokens, cost.window_tokens)
    formula, values = (
        "t0 + a n + b n^2/2",
        f"{as_term(cost.t0_s)} + {as_term(cost.a_s)} * {n} + {as_term(cost.b_s)} * {n}^2/2",
    )
    if cost.window_b_s:
        formula += " + b_w m (n - m/2), m = min(n, window)"
        values += f" + {as_term(cost.window_b_s)} * {seen} * ({n} - {seen}/2)"
    return Work("T", formula, values, f"{as_term(cost.prefill_s(n))} s")


def _row(link: Link, found: Transfer, prefill_s: float) -> dict[str, Any]:
    return {
        "name": link.name,
        "bytes_per_s": link.cost.bytes_per_s,
        "latency_s": link.cost.latency_s,
        "transfer_s": found.whole_s,
        "exposed_s": found.exposed_s,
        "hides": found.hides,
        "ttft_s": prefill_s + found.exposed_s,
        "ttft_unhidden_s": prefill_s + found.whole_s,
        "link_share": found.link_share,
        "keeps_up": found.link_share <= 1 + 1e-9,
        "max_requests_per_s": found.max_requests_per_s,
    }


def _work(link: Link, found: Transfer, case: _Case) -> list[Work]:
    nbytes, prefill_s, layers, rate = case
    size, speed, latency = as_term(nbytes), as_term(link.cost.bytes_per_s), as_term(link.cost.latency_s)
    layer = nbytes / layers / link.cost.bytes_per_s
    exposed = f"{latency} + {as_term(layer)} + {layers - 1} * max(0, {as_term(layer)} - {as_term(prefill_s)}/{layers})"
    shown = f"{as_term(found.whole_s)} s"
    return [
        Work(f"{link.name}: transfer", "latency + bytes / B", f"{latency} + {size} / {speed}", shown),
        Work(f"{link.name}: t", "bytes / (L B), of a layer", f"{size} / ({layers} * {speed})", f"{as_term(layer)} s"),
        Work(
            f"{link.name}: exposed",
            "latency + t + (L - 1) * max(0, t - T/L)",
            exposed,
            f"{as_term(found.exposed_s)} s",
        ),
        Work(
            f"{link.name}: link used",
            "requests/s * bytes / B",
            f"{as_term(rate)} * {size} / {speed}",
            as_percent(found.link_share),
        ),
    ]
