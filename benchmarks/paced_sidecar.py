"""A real sidecar whose drives read at a pace that is set from outside (benchmarks/paced_file.py).

`python -m benchmarks.paced_sidecar --socket PATH --nvme DIR --pace-file FILE` serves until SIGTERM, as `kvstore serve` does.
"""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import uvloop

from benchmarks.paced_file import Pace, PacedFile, PacedLink
from benchmarks.sidecar import until_faulted
from kvstore.config import load_config
from kvstore.demo.processes import Process
from kvstore.sidecar import Sidecar
from kvstore.tiers.nvme.file import DirectFile


class PacedSidecar(NamedTuple):
    """One that runs, and what holds its reads back."""

    socket: Path
    pace: Pace


@contextlib.contextmanager
def running_paced_sidecar(arena_nbytes: int, *, nvme: Path, nvme_nbytes: int) -> Iterator[PacedSidecar]:
    """In a process of its own, gone when the block ends; its arena has been faulted in by then. No pace is set yet."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        socket, pace_file = folder / "kvstore.sock", folder / "pace"
        pace = Pace.create(pace_file)
        sizes = ["--arena", str(arena_nbytes), "--nvme-bytes", str(nvme_nbytes)]
        serve = ["benchmarks.paced_sidecar", "--socket", socket, "--nvme", nvme, "--pace-file", pace_file, *sizes]
        guarded = [sys.executable, "-m", "kvstore.demo.guard", name, sys.executable, "-m", *map(str, serve)]
        sidecar = Process("sidecar", guarded, folder / "sidecar.log")
        sidecar.start()
        try:
            until_faulted(sidecar, socket, arena_nbytes)
            yield PacedSidecar(socket, pace)
        finally:
            sidecar.stop()


@click.command()
@click.option("--socket", required=True)
@click.option("--nvme", required=True, multiple=True, metavar="DIR", help="May be given several times.")
@click.option("--pace-file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--arena", default="256MiB", show_default=True)
@click.option("--segment", default=None)
@click.option("--nvme-bytes", default="1GiB", show_default=True, help="On each drive.")
@click.option("--writes/--reads-only", default=False, show_default=True, help="What the pace holds back.")
def main(
    *,
    socket: str,
    nvme: tuple[str, ...],
    pace_file: Path,
    arena: str,
    segment: str | None,
    nvme_bytes: str,
    writes: bool,
) -> None:
    sizes = {"arena_bytes": arena, "nvme_bytes": nvme_bytes}
    flags: dict[str, object] = {"socket": socket, "nvme": nvme, "grpc": False, **sizes}
    if segment is not None:
        flags["segment_bytes"] = segment
    config = load_config(file=None, environ={}, flags=flags)
    link = PacedLink(Pace.open(pace_file))

    def open_file(path: Path) -> PacedFile:
        return PacedFile(DirectFile.open(path), link, writes=writes)

    logging.basicConfig(level="INFO", format="time=%(asctime)s level=%(levelname)s source=%(name)s %(message)s")
    uvloop.run(Sidecar(config, on_ready=click.echo, open_file=open_file).run())


if __name__ == "__main__":
    main()
