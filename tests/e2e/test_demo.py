"""`kvstore demo` as a user runs it, on the packaged model: its rows, its exit status, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.core.errors import ConfigError
from kvstore.demo.outcome import CASES
from kvstore.models import INSTALL_LINE, MODEL_PACKAGE, find_model

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent.parent
PROMPT_TOKENS = 2000
RUN_DEADLINE_S = 540.0  # most of it for a machine with other work
START_DEADLINE_S = 120.0

WITHOUT_PACKAGE = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {MODEL_PACKAGE!r} else find(name, *rest)
sys.argv = ['kvstore', 'demo']
from kvstore.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return find_model(None)
    except ConfigError as err:
        pytest.skip(err.message)


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demo makes its folder; its processes are known by it."""
    folder = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))  # short: a socket's path has at most 107 bytes
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    expect_nothing_left(folder)
    folder.rmdir()


def expect_nothing_left(folder: Path, deadline_s: float = 20.0) -> None:
    until_s = time.monotonic() + deadline_s
    while processes_of(folder) or any(folder.iterdir()):
        assert time.monotonic() < until_s, (processes_of(folder), list(folder.iterdir()))
        time.sleep(0.05)


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that were started with this TMPDIR."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(folder):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def demo(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "demo", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=RUN_DEADLINE_S,
        check=False,
    )


@pytest.mark.timeout(RUN_DEADLINE_S + 60)
def test_the_demo_shares_a_prefill_and_leaves_nothing_behind(model: Path, private_tmp: Path) -> None:
    run = demo("--json", "--prompt-tokens", str(PROMPT_TOKENS), "--max-tokens", "8", "--model", str(model))

    assert run.returncode == 0, run.stderr
    rows = {row["case"]: row for row in json.loads(run.stdout)}
    assert tuple(rows) == CASES
    for row in rows.values():
        assert row["prompt_tokens"] == PROMPT_TOKENS
        assert row["same_output"] is True
        assert row["ttft_s"] > 0
        assert row["prefilled_tokens"] + row["local_cached_tokens"] + row["fetched_tokens"] == PROMPT_TOKENS
    reusable = (PROMPT_TOKENS - 1) // 16 * 16
    for case, cached, fetched in (
        ("off", 0, 0),
        ("cold_a", 0, 0),
        ("warm_a", reusable, 0),
        ("warm_b", 0, reusable),
        ("restarted_a", 0, reusable),
        ("restarted_b", 0, reusable),
        ("sidecar_killed", 0, reusable),
    ):
        assert (rows[case]["local_cached_tokens"], rows[case]["fetched_tokens"]) == (cached, fetched), case
    assert rows["warm_b"]["ttft_s"] <= rows["cold_a"]["ttft_s"] / 10
    assert rows["sidecar_killed"]["ttft_s"] <= rows["cold_a"]["ttft_s"] / 5
    assert rows["cold_a"]["saved_bytes"] >= rows["warm_b"]["fetched_bytes"] > 0
    for text in ("starting the sidecar", "loading the model", "cold_a", "B, store", "kill -9", "B, sidecar killed"):
        assert text in run.stderr


@pytest.mark.timeout(START_DEADLINE_S + 60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    model: Path, private_tmp: Path, number: signal.Signals
) -> None:
    """SIGKILL too: what it started notices."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli.main", "demo", "--model", str(model)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as running:
        until_s = time.monotonic() + START_DEADLINE_S
        while sum("kvstore.demo.engine_process" in line for line in processes_of(private_tmp)) < 3:
            assert time.monotonic() < until_s
            assert running.poll() is None
            time.sleep(0.05)

        running.send_signal(number)

        assert running.wait(30) != 0
    expect_nothing_left(private_tmp)


def test_a_missing_model_is_named_with_the_line_that_installs_one(private_tmp: Path) -> None:
    named = demo("--model", "/nowhere/model.gguf")
    hidden = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "KVSTORE_MODEL"},
        timeout=60,
        check=False,
    )

    assert (named.returncode, named.stdout) == (2, "")
    assert named.stderr == "error: model: cannot read /nowhere/model.gguf: No such file or directory\n"
    assert hidden.returncode == 2
    assert INSTALL_LINE in hidden.stderr


def test_a_file_that_is_no_model_is_named(private_tmp: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("not a model")

    run = demo("--json", "--model", str(other))

    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"error: model: {other} is not a GGUF file, which begins with GGUF\n"


@pytest.mark.timeout(START_DEADLINE_S + 60)
def test_a_model_that_is_cut_off_is_named_by_the_engine_and_logs_are_kept(private_tmp: Path, tmp_path: Path) -> None:
    cut, logs = tmp_path / "cut.gguf", tmp_path / "logs"
    cut.write_bytes(b"GGUF")

    run = demo("--json", "--model", str(cut), "--keep-logs", str(logs))

    assert (run.returncode, run.stdout) == (2, "")
    assert f"error: model: cannot use {cut}" in run.stderr
    assert "Traceback" not in run.stderr
    assert {"kvstore-sidecar.log", "engine-off.log"} <= {path.name for path in logs.iterdir()}


@pytest.mark.timeout(START_DEADLINE_S + 60)
def test_a_prompt_longer_than_the_model_is_refused_with_both_lengths(model: Path, private_tmp: Path) -> None:
    run = demo("--json", "--model", str(model), "--prompt-tokens", "8193")

    assert (run.returncode, run.stdout) == (2, "")
    assert "error: prompt: 8193 tokens are more than the model's context of 8192" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prompt-tokens", "0"), "0 is not in the range x>=1"),
        (("--arena", "1lightyear"), "arena_bytes: '1lightyear' is not right"),
        (("--arena", "1000TiB"), "arena_bytes"),
    ],
)
def test_a_wrong_option_is_told(model: Path, private_tmp: Path, arguments: tuple[str, str], sentence: str) -> None:
    run = demo("--model", str(model), *arguments)

    assert run.returncode == 2
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
