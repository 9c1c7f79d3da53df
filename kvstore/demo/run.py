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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.core.errors import PeerUnavailable
from kvstore.core.limits import INDEX_COMMIT_INTERVAL_S
from kvstore.demo.document import OTHER_QUESTION, QUESTION
from kvstore.demo.outcome import Answer, Row, compare
from kvstore.demo.processes import Engine, Sidecar
from kvstore.demo.progress import Progress
from kvstore.proto.kvstore_pb2 import TOOL, StatsReply, TierStats

SIDECAR_DEADLINE_S = 30.0
"""Hello takes under a second; a loaded machine several."""

LOAD_DEADLINE_S = 180.0
"""Three engines that dequantise their weights at once on two cores need about 20 s."""

ANSWER_DEADLINE_S = 300.0
"""A prefill of the model's whole context takes a minute on two cores."""

SAVE_DEADLINE_S = 10.0
"""For the last blocks of a cold prefill to reach the store; they take milliseconds."""

WRITE_DEADLINE_S = 60.0
"""For all blocks to reach the drive. They have had the time of all the cases; a slow disk writes 256 MiB in some seconds."""

COMMIT_S = 10 * INDEX_COMMIT_INTERVAL_S
"""From then until the drive's index knows them for good: a group commit and its sync, with a reserve for a slow disk."""

STATS_DEADLINE_S = 5.0
"""For the sidecar's figures: nothing waits for them, and engines at work may keep the sidecar off every core for a while."""

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line settles."""

    model: Path
    arena: str
    prompt_tokens: int
    max_tokens: int
    log_dir: Path | None  # None: logs go to the run's own folder and vanish with it


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
        self._options = options
        self._run_dir = run_dir
        self._progress = progress
        self._logs = options.log_dir if options.log_dir is not None else run_dir
        self._socket = run_dir / "kvstore.sock"
        self._sidecar = self._make_sidecar("sidecar")
        self._stats = Client(
            str(self._socket), role=TOOL, connect_deadline_s=STATS_DEADLINE_S, call_deadline_s=STATS_DEADLINE_S
        )
        self._engines: list[Engine] = []

    def all_cases(self) -> DemoResult:
        """See the module's docstring."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._progress.step("starting the sidecar"):
            self._start_sidecar()
        with self._progress.step("loading the model in three engine processes: one without a store, A and B"):
            off, a, b = self._start_engines("off", "a", "b")
        asked = self._ask(off, "off", QUESTION, "without a store")
        rows = [self._row("off", asked, 0, asked)]
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
            self._restart_killed_sidecar()
        with self._progress.step("loading B again"):
            (b,) = self._start_engines("sidecar_killed")
        rows.append(self._case("sidecar_killed", b, asked, "B, from the drive"))
        return DemoResult(tuple(rows), other)

    def close(self) -> None:
        """End every process, the sidecar last."""
        for engine in self._engines:
            engine.stop()
        self._stats.close()
        self._sidecar.stop()

    def _make_sidecar(self, log_name: str) -> Sidecar:
        log = self._logs / f"{log_name}.log"
        arena = self._options.arena
        drive = ("--nvme", str(self._run_dir / "nvme"), "--nvme-bytes", arena)
        return Sidecar(self._run_dir, self._socket, arena, log, "--no-grpc", *drive)

    def _restart_killed_sidecar(self) -> None:
        self._sidecar.kill()
        self._sidecar.stop()
        self._sidecar = self._make_sidecar("sidecar-restarted")
        self._start_sidecar()
        until_s = time.monotonic() + SIDECAR_DEADLINE_S
        while any(drive.state == "recovering" for drive in _tier(self._stats.stats(), "nvme").drives):
            if time.monotonic() > until_s:
                raise self._sidecar.failure(f"still recovering after {SIDECAR_DEADLINE_S:.0f} s")
            time.sleep(_POLL_S)

    def _start_sidecar(self) -> None:
        self._sidecar.start()
        until_s = time.monotonic() + SIDECAR_DEADLINE_S
        while True:
            try:
                self._stats.connect()
            except PeerUnavailable as err:
                if not self._sidecar.running:
                    raise self._sidecar.failure("ended at start") from err
                if time.monotonic() > until_s:
                    raise self._sidecar.failure(f"no answer within {SIDECAR_DEADLINE_S:.0f} s") from err
                time.sleep(_POLL_S)
            else:
                return

    def _start_engines(self, *names: str) -> list[Engine]:
        started = []
        for name in names:
            socket = None if name == "off" else self._socket
            engine = Engine(f"engine {name}", self._options.model, socket, self._logs / f"engine-{name}.log")
            self._engines.append(engine)
            engine.start()
            started.append(engine)
        for engine in started:
            engine.wait_ready(LOAD_DEADLINE_S)
        return started

    def _case(self, case: str, engine: Engine, off: Answer, text: str) -> Row:
        before = self._stored_bytes()
        answer = self._ask(engine, case, QUESTION, text)
        self._wait_for_saves()
        return self._row(case, answer, self._stored_bytes() - before, off)

    def _other_question(self, off: Engine, b: Engine) -> Row:
        """B fetches nothing twice: it has the document in its pool by now, and so has the storeless engine."""
        expected = self._ask(off, "off", OTHER_QUESTION, "another question, without a store")
        return self._row("other_question", self._ask(b, "warm_b", OTHER_QUESTION, "another question, B"), 0, expected)

    def _ask(self, engine: Engine, case: str, question: str, text: str) -> Answer:
        options = self._options
        with self._progress.step(f"{case}: {text}") as step:
            fields = engine.ask(
                question=question,
                prompt_tokens=options.prompt_tokens,
                max_tokens=options.max_tokens,
                deadline_s=ANSWER_DEADLINE_S,
            )
            answer = answer_from(fields)
            step.result = f"first token after {answer.ttft_s:.2f} s"
        return answer

    def _row(self, case: str, answer: Answer, saved_bytes: int, off: Answer) -> Row:
        return Row(case, answer, saved_bytes, compare(off, answer))

    def _stored_bytes(self) -> int:
        """Committed by engines since the sidecar's start; all blocks are of one size."""
        stats = self._stats.stats()
        pinned = _tier(stats, "pinned")
        return stats.counters["stored_blocks_total"] * (pinned.ready_bytes // max(1, pinned.ready_blocks))

    def _wait_for_saves(self) -> None:
        """Until nothing is being written any more. Past the deadline we go on: what is missing shows in the rows."""
        until_s = time.monotonic() + SAVE_DEADLINE_S
        while _tier(self._stats.stats(), "pinned").writing_bytes and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _wait_until_durable(self) -> None:
        """Until the drive has every block, and its index knows so. Past the deadline we go on, as above."""
        until_s = time.monotonic() + WRITE_DEADLINE_S
        while not _is_written(self._stats.stats()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        time.sleep(COMMIT_S)


def _tier(stats: StatsReply, name: str) -> TierStats:
    (tier,) = [tier for tier in stats.tiers if tier.name == name]
    return tier


def _is_written(stats: StatsReply) -> bool:
    return _tier(stats, "nvme").ready_blocks == stats.num_blocks


def answer_from(fields: Mapping[str, Any]) -> Answer:
    """The answer that an engine process sent as JSON, whose lists become tuples again."""
    return Answer(**{**fields, "token_ids": tuple(fields["token_ids"]), "logit_gaps": tuple(fields["logit_gaps"])})
