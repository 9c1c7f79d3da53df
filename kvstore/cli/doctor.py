"""`kvstore doctor`: is this machine fit, and does the sidecar answer?"""

import json
import sys

import click

from kvstore.cli.finite import SECONDS

_MARKS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option("--socket", help="Path of the sidecar's local socket.  [default: as for serve]")
@click.option("--nvme", multiple=True, help="A directory of a drive; may be repeated.  [default: as for serve]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.option("--deadline-s", type=SECONDS, default=2.0, show_default=True, help="For the sidecar to answer.")
def doctor(*, socket: str | None, nvme: tuple[str, ...], as_json: bool, deadline_s: float) -> None:
    """Check this environment: versions, memory, limits, devices, drives, the sidecar, and whether engines hash alike.

    A line for each check: ok, warning or problem, what was found, and what would be right. Run it as the user and in the
    environment of the engine. Exit code: 0 no problem, 1 a problem.
    """
    from kvstore.doctor import Level, examine

    findings = list(examine(socket, nvme, deadline_s=deadline_s))
    if as_json:
        click.echo(json.dumps({"findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            mark = click.style(f"{finding.level:7}", fg=_MARKS[finding.level])
            right = f" -> {finding.right}" if finding.right else ""
            click.echo(f"{mark}  {finding.check:{width}}  {finding.found}{right}")
    sys.exit(any(finding.level is Level.PROBLEM for finding in findings))
