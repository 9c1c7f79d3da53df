"""`kvstore check`: does a drive hold what its index says?"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # the command's help needs neither numpy nor lmdb
    from kvstore.tiers.nvme.check import CheckReport


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--repair", is_flag=True, help="Remove damaged entries, try quarantined slots, rebuild an unreadable index."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def check(directory: Path, *, repair: bool, as_json: bool) -> None:
    """Verify a drive's directory that no sidecar is using: every block's checksum, the index, the slots.

    Changes nothing without --repair, which costs the blocks that are damaged and no others, unless the index itself cannot
    be read: then all. Exit code: 0 nothing is wrong, 1 something was (also when it is repaired now), 2 the drive cannot be
    looked at.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from kvstore.tiers.nvme.check import check_drive

    columns = "reading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        report = check_drive(
            directory,
            repair=repair,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        click.echo(json.dumps(_fields(report), indent=2, sort_keys=True))
    else:
        _print_tables(report)
    sys.exit(0 if report.is_clean else 1)


def _fields(report: "CheckReport") -> dict[str, object]:
    return report._asdict() | {
        "path": str(report.path),
        "clean": report.is_clean,
        "namespaces": [namespace._asdict() for namespace in report.namespaces],
        "findings": [finding._asdict() for finding in report.findings],
    }


def _print_tables(report: "CheckReport") -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    console = Console()
    click.echo(f"{report.path}: {report.num_blocks:,} blocks are whole")
    states = ("capacity", "used", "quarantined", "free")
    sizes = Table(*states)
    sizes.add_row(*(decimal(getattr(report, f"{state}_bytes")) for state in states))
    console.print(sizes)
    if report.namespaces:
        namespaces = Table("namespace", "tenant", "block bytes", "blocks")
        for namespace in report.namespaces:
            namespaces.add_row(
                namespace.namespace, namespace.tenant, f"{namespace.block_nbytes:,}", f"{namespace.num_blocks:,}"
            )
        console.print(namespaces)
    if report.problems:
        problems = Table("problem", "found")
        for kind, count in sorted(report.problems.items()):
            problems.add_row(kind, f"{count:,}")
        console.print(problems)
        for finding in report.findings:
            click.echo(f"{finding.kind}: {finding.detail}")
        if (more := sum(report.problems.values()) - len(report.findings)) > 0:
            click.echo(f"and {more:,} more")
    for what, count in sorted(report.repaired.items()):
        click.echo(f"repaired: {what}: {count:,}")
    if report.problems and not report.repaired:
        click.echo("run again with --repair to remove what is damaged")
