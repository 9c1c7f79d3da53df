"""SGLang's controller with our backend, in processes of their own, beside a real sidecar; SGLang's file backend is the oracle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sidecar_process import ROOT, read_line, running_sidecar

HERE = Path(__file__).parent
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGE = 16
START_DEADLINE_S = 90.0
CALL_DEADLINE_S = 60.0


class Rank:
    """A process with engines, by name."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "rank_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a"),
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def wait_until_ready(self) -> "Rank":
        assert read_line(self._child, START_DEADLINE_S) == '"ready"', self.log.read_text()
        return self

    def send(self, name, verb, **arguments):
        self._child.stdin.write(json.dumps([name, verb, arguments]) + "\n")
        self._child.stdin.flush()

    def receive(self):
        answer = json.loads(read_line(self._child, CALL_DEADLINE_S))
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def __call__(self, name, verb, **arguments):
        self.send(name, verb, **arguments)
        return self.receive()

    def stop(self):
        self._child.kill()
        self._child.communicate(timeout=10)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    both = [Rank(folder / f"rank{i}.log") for i in range(2)]
    yield [rank.wait_until_ready() for rank in both]
    for rank in both:
        rank.stop()


@pytest.fixture
def sidecar(tmp_path):
    with running_sidecar(tmp_path) as process:
        yield process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights to fingerprint."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.safetensors").write_bytes(np.random.default_rng(1).bytes(1 << 16))
    (folder / "config.json").write_text(json.dumps({"rope_theta": 1e4, "num_hidden_layers": 4}))
    return folder


def ours(sidecar, model, **more):
    names = {
        "backend_name": "kvstore",
        "module_path": "kvstore.engine_connector.sglang",
        "class_name": "KVStoreHiCache",
    }
    return names | {"interface_v1": 1, "socket": str(sidecar.socket), "model_path": str(model)} | more


def prompt(seed, num_pages):
    return [seed * 100_000 + i for i in range(num_pages * PAGE)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_process_gets_the_same_bytes_as_from_the_file_backend(ranks, sidecar, model, tmp_path, layout):
    first, second = ranks
    tokens = prompt(1, 150)  # more than one call of 128 pages
    files = {"file_storage_path": str(tmp_path / "files")}
    for rank in ranks:
        rank("ours", "open", layout=layout, backend="dynamic", extra=ours(sidecar, model))
        rank("file", "open", layout=layout, backend="file", extra=files)

    assert [first(name, "save", tokens=tokens) for name in ("ours", "file")] == [150 * PAGE] * 2
    answers = [second(name, "load", tokens=tokens) for name in ("ours", "file")]

    for answer in answers:
        assert (answer["found"], answer["brought"], answer["right"]) == (150 * PAGE, 150 * PAGE, 150)
    contents = [second(name, "page_bytes", tokens=tokens[: 4 * PAGE]) for name in ("ours", "file")]
    assert contents[0] == contents[1]
    assert None not in contents[0]
    for rank in ranks:
        rank("ours", "close")
        rank("file", "close")
