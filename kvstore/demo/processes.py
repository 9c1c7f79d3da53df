"""The demo's processes as their starter sees them. Every wait has a deadline; what ends early shows the end of its log."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from kvstore.config import ENV_PREFIX
from kvstore.core.errors import KVStoreError, error_from_wire
from kvstore.demo.guard import KILL_SIGNAL, STOP_DEADLINE_S
from kvstore.demo.outcome import Answer, answer_from

LOG_TAIL_LINES = 15


class ProcessFailed(KVStoreError):
    """A process of the demo ended early, hung, or said something unexpected. Fields: process."""

    code = "ProcessFailed"


class Process:
    """A child in a process group of its own, so that Ctrl-C reaches the demo alone, which then ends its children. It does
    not see our settings in the environment: what it is to do is in its command."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its errors go to the log."""
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603 (our own interpreter and modules)
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
                env=_environment(),
            )

    @property
    def running(self) -> bool:
        """Whether it has been started and not ended."""
        return self._child is not None and self._child.poll() is None

    def stop(self) -> None:
        """Let go of its standard input, which ends it; kill it after a deadline. Safe to call twice."""
        child, self._child = self._child, None
        if child is None:
            return
        self._end(child)
        _close(_pipe(child.stdin))
        _pipe(child.stdout).close()
        try:
            child.wait(2 * STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(STOP_DEADLINE_S)

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        """What is done before letting go."""

    def failure(self, reason: str) -> ProcessFailed:
        """The error to raise, with the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        tail = "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
        text = f"{self.name}: {reason}" + (f"; the end of its log:\n{tail}" if tail else "")
        return ProcessFailed(text, process=self.name)


class Guarded(Process):
    """A server behind a guard that ends it when we are killed, and then removes `run_dir`."""

    def __init__(self, name: str, run_dir: Path, command: Sequence[str], log: Path) -> None:
        super().__init__(name, [sys.executable, "-m", "kvstore.demo.guard", str(run_dir), *command], log)

    def kill(self) -> None:
        """kill -9 of the server itself. Raises ProcessFailed when it lives on."""
        assert self._child is not None
        self._child.send_signal(KILL_SIGNAL)
        try:
            self._child.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired as err:
            raise self.failure(f"lives on {STOP_DEADLINE_S:.0f} s after kill -9") from err


class Sidecar(Guarded):
    """`kvstore serve`. Its drives' directories are in `run_dir` and outlive it, but not us."""

    def __init__(self, run_dir: Path, socket: Path, arena: str, log: Path, *options: str) -> None:
        serve = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", str(socket), "--arena", arena, *options]
        super().__init__("sidecar", run_dir, serve, log)


class Engine(Process):
    """kvstore/demo/engine_process.py: one line out, one line back."""

    def __init__(self, name: str, model: Path, socket: Path | None, log: Path, *, learn: bool = False) -> None:
        arguments = [str(model)] if socket is None else [str(model), str(socket)]
        arguments += ["learn"] if learn else []
        super().__init__(name, [sys.executable, "-m", "kvstore.demo.engine_process", *arguments], log)
        self._unread = b""

    def wait_ready(self, deadline_s: float) -> None:
        """Until the model is loaded and warm. Raises what the engine raised, or ProcessFailed."""
        self._expect("ready", deadline_s)

    def ask(
        self, *, question: str, prompt_tokens: int, max_tokens: int, deadline_s: float, document: int = 0
    ) -> Answer:
        """Raises what the engine raised, or ProcessFailed."""
        request = {
            "question": question,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "document": document,
        }
        assert self._child is not None
        stdin = _pipe(self._child.stdin)
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as err:
            raise self.failure("ended") from err
        return answer_from(self._expect("answer", deadline_s))

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        """At once: it may be importing or computing, and the sidecar must bear an engine's sudden end anyway."""
        child.kill()

    def _expect(self, event: str, deadline_s: float) -> Mapping[str, object]:
        message: dict[str, object] = json.loads(self._read_line(time.monotonic() + deadline_s, deadline_s))
        found = message.pop("event")
        if found == "error":
            fields = message["fields"]
            assert isinstance(fields, dict)
            raise error_from_wire(str(message["code"]), str(message["message"]), fields)
        if found != event:
            raise self.failure(f"said {found!r}, not {event!r}")
        return message

    def _read_line(self, until_s: float, deadline_s: float) -> bytes:
        assert self._child is not None
        stdout = _pipe(self._child.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise self.failure(f"no answer within {deadline_s:.0f} s")
                received = os.read(stdout.fileno(), 1 << 16)
                if not received:
                    raise self.failure(f"ended with status {self._child.wait(STOP_DEADLINE_S)}")
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _environment() -> dict[str, str]:
    """Ours without our settings. Threads of a matrix product that wait spinning, OpenMP's default, made a prefill ten times
    slower on two cores with other work; waiting asleep costs nothing to speak of where there is none."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | inherited


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _close(stdin: IO[bytes]) -> None:
    try:
        stdin.close()
    except BrokenPipeError:
        return  # it ended with a request unread
