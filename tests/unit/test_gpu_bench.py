"""The GPU benchmark runs to its end, on the host in Triton's interpreter; without a GPU it says so; its file makes a table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 110.0


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True)


def test_every_section_has_rows_and_they_make_a_table(interpreter_env, tmp_path):
    file = tmp_path / "gpu.json"

    run(interpreter_env, "--tiny", "--json", str(file))

    result = json.loads(file.read_text())
    what = [row["what"] for row in result["rows"]]
    for words in (
        "pack, as it is",
        "unpack, int8",
        "out staged, separate",
        "in runs, blocks",
        "beside in direct",
        "loaded",
    ):
        assert any(words in name for name in what), words
    assert all(row["n"] >= 1 and row["p50_ms"] > 0 for row in result["rows"])
    table = run(interpreter_env, "--markdown", str(file)).stdout.splitlines()
    assert len([line for line in table if line.startswith("|")]) == len(what) + 2


def test_without_a_gpu_it_says_so_and_is_done(interpreter_env, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    done = run(interpreter_env, "--json", str(tmp_path / "gpu.json"))

    assert "no GPU" in done.stderr
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == []
