"""The guard: its command ends when the starter lets go, and never outlives it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.demo.guard import KILL_SIGNAL

GUARD = [sys.executable, "-m", "kvstore.demo.guard"]
REPORTS_PID_AND_SLEEPS = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + REPORTS_PID_AND_SLEEPS
DEADLINE_S = 30


def start(run_dir: Path, *command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*GUARD, str(run_dir), *command], stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def let_go_and_wait(guard: "subprocess.Popen[bytes]") -> int:
    guard.stdin.close()
    status = guard.wait(DEADLINE_S)
    guard.stderr.close()
    return status


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_letting_go_ends_the_command_and_removes_the_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "kvstore.sock").touch()
    guard = start(run_dir, sys.executable, "-c", REPORTS_PID_AND_SLEEPS)
    child = int(guard.stderr.readline())

    let_go_and_wait(guard)

    assert not is_running(child)
    assert not run_dir.exists()


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    guard = start(tmp_path / "run", sys.executable, "-c", IGNORES_SIGTERM)
    child = int(guard.stderr.readline())

    let_go_and_wait(guard)

    assert not is_running(child)


def test_kill_9_on_request_spares_the_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    guard = start(run_dir, sys.executable, "-c", IGNORES_SIGTERM)
    child = int(guard.stderr.readline())

    guard.send_signal(KILL_SIGNAL)

    assert guard.wait(DEADLINE_S) != 0
    assert not is_running(child)
    assert run_dir.exists(), "what it left there is wanted by the next one"
    let_go_and_wait(guard)


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_that_ends_by_itself_gives_the_guard_its_status(tmp_path: Path, status: int) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    guard = start(run_dir, sys.executable, "-c", f"raise SystemExit({status})")

    assert guard.wait(DEADLINE_S) == status
    assert run_dir.exists(), "the folder is the starter's as long as the starter lives"
    let_go_and_wait(guard)
