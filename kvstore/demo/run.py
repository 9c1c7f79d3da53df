"""The demo's route: start everything, ask the same question in each case, clean up whatever happens.

    sidecar, engines off + A + B up   ->  off -> cold_a -> warm_a -> warm_b (-> another question on B)
    A and B ended and started again   ->  restarted_a -> restarted_b
    all ended, the sidecar by kill -9, sidecar and B started again   ->  sidecar_killed

One case runs at a time; the other engines wait on a pipe and use no CPU. Each engine process first answers one short
unrelated prompt, so that thread pools and first allocations are paid for before anything is timed, the same in every case.
"""

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.limits import INDEX_COMMIT_INTERVAL_S
from kvstore.demo.document import OTHER_QUESTION
from kvstore.demo.engines import Engines
from kvstore.demo.node import POLL_S, Node
from kvstore.demo.options import DemoOptions
from kvstore.demo.outcome import Answer, Row, compare
from kvstore.demo.processes import Engine
from kvstore.demo.progress import Progress

WRITE_DEADLINE_S = 60.0
"""For all blocks to reach the drive. They have had the time of all the cases; a slow disk writes 256 MiB in some seconds."""

COMMIT_S = 10 * INDEX_COMMIT_INTERVAL_S
"""From then until the drive's index knows them for good: a group commit and its sync, with a reserve for a slow disk."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Rows of the cases in order, and one more row: another question on the same document."""

    rows: tuple[Row, ...]
    other_question: Row


def run_demo(options: DemoOptions, progress: Progress) -> DemoResult:
    """Run all cases. Raises KVStoreError when a process fails; leaves no process, socket or folder behind in any case."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-demo-", ignore_cleanup_errors=True) as run_dir,
        contextlib.closing(_Run(options, Path(run_dir), progress)) as run,
    ):
        return run.all_cases()


class _Run:
    """One run's processes. `close` ends them."""

    def __init__(self, options: DemoOptions, run_dir: Path, progress: Progress) -> None:
        self._progress = progress
        self._logs = options.log_dir if options.log_dir is not None else run_dir
        drive = ("--nvme", str(run_dir / "nvme"), "--nvme-bytes", options.arena)
        self._node = Node("kvstore", run_dir, self._logs, options.arena, "--no-grpc", *drive)
        self._engines = Engines(options, self._logs, progress)

    def all_cases(self) -> DemoResult:
        """See the module's docstring."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._progress.step("starting the sidecar"):
            self._node.spawn()
            self._node.wait_ready()
        with self._progress.step("loading the model in three engine processes: one without a store, A and B"):
            off, a, b = self._start_engines("off", "a", "b")
        asked = self._engines.ask(off, "off", "without a store")
        rows = [Row("off", asked, 0, compare(asked, asked))]
        rows.append(self._case("cold_a", a, asked, "A, the store is empty"))
        rows.append(self._case("warm_a", a, asked, "A again, from its own pool"))
        rows.append(self._case("warm_b", b, asked, "B, from the store"))
        other = self._other_question(off, b)
        with self._progress.step("ending A and B and loading them again; the sidecar stays"):
            a.stop()
            b.stop()
            a, b = self._start_engines("restarted_a", "restarted_b")
        rows.append(self._case("restarted_a", a, asked, "A restarted, from the store"))
        rows.append(self._case("restarted_b", b, asked, "B restarted, from the store"))
        with self._progress.step("ending A and B, kill -9 of the sidecar, and starting it again on the same directory"):
            a.stop()
            b.stop()
            self._wait_until_durable()
            self._node.kill()
            self._node.restart()
        with self._progress.step("loading B again"):
            (b,) = self._start_engines("sidecar_killed")
        rows.append(self._case("sidecar_killed", b, asked, "B, from the drive"))
        return DemoResult(tuple(rows), other)

    def close(self) -> None:
        """End every process, the sidecar last."""
        self._engines.close()
        self._node.close()

    def _start_engines(self, *names: str) -> list[Engine]:
        return self._engines.start({name: None if name == "off" else self._node.socket for name in names})

    def _case(self, case: str, engine: Engine, off: Answer, text: str) -> Row:
        before = self._stored_bytes()
        answer = self._engines.ask(engine, case, text)
        self._node.wait_for_saves()
        return Row(case, answer, self._stored_bytes() - before, compare(off, answer))

    def _other_question(self, off: Engine, b: Engine) -> Row:
        """B fetches nothing twice: it has the document in its pool by now, and so has the storeless engine."""
        expected = self._engines.ask(off, "off", "another question, without a store", question=OTHER_QUESTION)
        answer = self._engines.ask(b, "warm_b", "another question, B", question=OTHER_QUESTION)
        return Row("other_question", answer, 0, compare(expected, answer))

    def _stored_bytes(self) -> int:
        """Committed by engines since the sidecar's start; all blocks are of one size."""
        stats = self._node.stats()
        pinned = next(tier for tier in stats.tiers if tier.name == "pinned")
        return stats.counters["stored_blocks_total"] * (pinned.ready_bytes // max(1, pinned.ready_blocks))

    def _wait_until_durable(self) -> None:
        """Until the drive has every block, and its index knows so. Past the deadline we go on: what is missing shows in the
        rows."""
        until_s = time.monotonic() + WRITE_DEADLINE_S
        while not self._is_written() and time.monotonic() < until_s:
            time.sleep(POLL_S)
        time.sleep(COMMIT_S)

    def _is_written(self) -> bool:
        stats = self._node.stats()
        return any(tier.name == "nvme" and tier.ready_blocks == stats.num_blocks for tier in stats.tiers)
