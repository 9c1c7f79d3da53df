"""`kvstore break-even --measure`: this machine's copies and the included engine's prefill, and what is refused without them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from sidecar_process import running_sidecar

from kvstore.cli.main import cli
from kvstore.core.errors import ConfigError, PeerUnavailable

sys.path.append(str(Path(__file__).parent.parent / "engine"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_llama import random_tensors, write_gguf

    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", random_tensors())


def measure(model: Path, *arguments: str) -> dict:
    command = ["break-even", "--measure", "--engine-model", str(model), "--context", "4096", "--json", *arguments]
    return json.loads(CliRunner().invoke(cli, command, catch_exceptions=False).stdout)


@pytest.mark.e2e
def test_this_machine_is_measured(model: Path) -> None:
    found = measure(model)

    assert found["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 2, "layers, K and V, heads, dims, bytes: from the model file"
    assert 0 < found["prefill_s"] < 60
    (memory,) = found["tiers"]
    assert memory["name"] == "host-memory"
    assert 1e8 < memory["bytes_per_s"] < 1e12
    assert any(note.startswith("measured on this machine") for note in found["notes"])


@pytest.mark.e2e
def test_a_sidecar_tells_what_it_holds(model: Path, tmp_path: Path) -> None:
    with running_sidecar(tmp_path) as sidecar:
        found = measure(model, "--socket", str(sidecar.socket))

    assert any(note.startswith("the sidecar holds 0 blocks") for note in found["notes"])
    assert "the sidecar has made no plan yet, so it has no speeds to tell" in found["notes"]


def test_a_sidecar_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match=r"none\.sock"):
        measure(model, "--socket", str(tmp_path / "none.sock"))


def test_without_the_engine_it_says_how_to_get_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"--measure: .*pip install 'kvstore-tiered\[engine\]'"):
        measure(model)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.gguf"):
        measure(tmp_path / "none.gguf")
