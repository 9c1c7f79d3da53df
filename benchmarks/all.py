"""All benchmarks, one after the other; `python -m benchmarks.all --markdown benchmarks/RESULTS.md` writes their results."""

import importlib
from pathlib import Path

import click

from benchmarks.harness import as_markdown, machine_card, show

NAMES = (
    "hashing",
    "rpc",
    "blocks",
    "nvme",
    "nvme_restart",
    "link_tcp",
    "directory_scale",
    "link_rdma",
    "overhead",
    "metrics_cost",
    "index_memory",
    "engine_speed",
    "disaggregation",
    "layerwise",
    "kv_quality",
    "chats",
    "no_regret",
    "published_ttft",
    "policy_simulation",
    "eviction",
    "route",
)

_HEAD = """# Results

Written by `make bench`; each section names the command that repeats it. Times are wall times of a shared machine: compare
ratios to the limit measured in the same run (cases take turns). p99 of fewer than 100 runs is the largest.
"""


@click.command()
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this file too.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Run these alone.")
def main(*, markdown: Path | None, only: tuple[str, ...]) -> None:
    card = machine_card()
    sections = [_HEAD, "| machine | |\n| --- | --- |", *[f"| {name} | {value} |" for name, value in card.items()], ""]
    for name in only or NAMES:
        report = importlib.import_module(f"benchmarks.{name}").run()
        show(report, card, as_json=False)
        sections.append(as_markdown(report))
    if markdown is not None:
        markdown.write_text("\n".join(sections))


if __name__ == "__main__":
    main()
