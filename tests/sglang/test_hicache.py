"""SGLang's controller with our backend, in processes of their own, beside a real sidecar; SGLang's file backend is the oracle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sidecar_process import ROOT, SidecarProcess, read_line, running_sidecar

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


@pytest.fixture
def make_sidecar(tmp_path):
    """Not started yet."""
    made = []

    def make(*flags):
        made.append(SidecarProcess(tmp_path / "kvstore.sock", *flags))
        return made[-1]

    yield make
    for sidecar in made:
        sidecar.stop()


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


def test_what_is_saved_in_parts_is_found_as_a_whole(ranks, sidecar, model):
    first, second = opened(ranks, sidecar, model)
    tokens = prompt(2, 20)

    assert first("ours", "save", tokens=tokens[: 12 * PAGE]) == 12 * PAGE
    assert first("ours", "save", tokens=tokens, num_before=12 * PAGE) == 8 * PAGE

    assert all_right(second("ours", "load", tokens=tokens)) == 20


def test_a_store_without_room_takes_the_first_pages(ranks, tmp_path, model):
    with running_sidecar(tmp_path, arena="2MiB") as sidecar:
        first, second = opened(ranks, sidecar, model)
        tokens = prompt(3, 190)

        assert (
            first("ours", "save", tokens=tokens) < 190 * PAGE
        )  # SGLang stops at the first call that is not stored whole

        assert 0 < all_right(second("ours", "load", tokens=tokens)) < 190
        close(ranks)


def test_other_weights_under_the_same_name_share_nothing(ranks, sidecar, model, tmp_path):
    first, second = ranks
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"other weights")
    first("ours", "open", layout="page_first", backend="dynamic", extra=ours(sidecar, model))
    second("ours", "open", layout="page_first", backend="dynamic", extra=ours(sidecar, tmp_path / "other"))

    assert first("ours", "save", tokens=prompt(4, 5)) == 5 * PAGE

    assert second("ours", "load", tokens=prompt(4, 5))["found"] == 0
    close(ranks)


def test_what_is_cleared_is_gone(ranks, sidecar, model):
    first, second = opened(ranks, sidecar, model)
    first("ours", "save", tokens=prompt(5, 5))

    second("ours", "clear")

    assert first("ours", "load", tokens=prompt(5, 5))["found"] == 0


def test_an_absent_sidecar_costs_hits_only_and_is_found_when_it_comes(ranks, make_sidecar, model):
    sidecar = make_sidecar()
    first, second = opened(ranks, sidecar, model)
    tokens = prompt(6, 5)
    assert first("ours", "save", tokens=tokens) == 0
    assert second("ours", "load", tokens=tokens)["found"] == 0

    sidecar.start()

    until(lambda: first("ours", "save", tokens=tokens) == 5 * PAGE)
    until(lambda: second("ours", "load", tokens=tokens)["right"] == 5)
    close(ranks)


def test_a_sidecar_killed_in_mid_load_costs_pages_never_bytes(ranks, make_sidecar, model):
    """At moments from before the look-up to after the last copy."""
    sidecar = make_sidecar().start()
    first, second = opened(ranks, sidecar, model)
    rng = np.random.default_rng(seed := time.time_ns() % 1000)
    for turn in range(6):
        tokens = prompt(10 + turn, 190)
        until(lambda tokens=tokens: first("ours", "save", tokens=tokens) == 190 * PAGE)
        until(lambda tokens=tokens: second("ours", "load", tokens=tokens)["brought"] == 190 * PAGE)

        second.send("ours", "load", tokens=tokens)
        time.sleep(rng.uniform(0, 0.02))
        sidecar.kill()

        answer = second.receive()
        assert answer["right"] * PAGE == answer["brought"], f"seed {seed}"
        assert second("ours", "load", tokens=tokens)["found"] == 0
        sidecar.start()
    close(ranks)


def test_a_sidecar_that_hangs_holds_nobody_up(ranks, sidecar, model):
    first, second = opened(ranks, sidecar, model)
    tokens = prompt(7, 5)
    first("ours", "save", tokens=tokens)
    os.kill(sidecar.pid, signal.SIGSTOP)
    started_s = time.monotonic()

    answers = [second("ours", "load", tokens=tokens)["found"] for _ in range(20)]

    assert answers == [0] * 20
    assert time.monotonic() - started_s < 5.0  # one call's deadline, and the breaker's
    os.kill(sidecar.pid, signal.SIGCONT)
    until(lambda: second("ours", "load", tokens=tokens)["right"] == 5)
    close(ranks)


def test_pages_come_back_from_a_drive_and_damaged_ones_are_misses(ranks, make_sidecar, model, tmp_path):
    drive = tmp_path / "drive"
    sidecar = make_sidecar("--nvme", str(drive), "--nvme-bytes", "32MiB").start()
    first, second = opened(ranks, sidecar, model)
    tokens = prompt(8, 60)
    assert first("ours", "save", tokens=tokens) == 60 * PAGE
    time.sleep(
        0.5
    )  # a drive's group commit takes 50 ms; what is not there yet is a miss, so this decides how much is tested
    sidecar.stop()
    sidecar.start()
    until(lambda: second("ours", "load", tokens=tokens)["right"] == 60)
    damaged = bytes.fromhex(second("ours", "page_bytes", tokens=tokens)[30])
    sidecar.stop()
    data = bytearray((drive / "blocks.kv").read_bytes())
    data[data.index(damaged[:64])] ^= 1
    (drive / "blocks.kv").write_bytes(data)
    sidecar.start()

    answers = []
    until(lambda: answers.append(second("ours", "load", tokens=tokens)) or answers[-1]["found"] == 60 * PAGE)

    assert (answers[-1]["brought"], answers[-1]["right"]) == (30 * PAGE, 30)
    close(ranks)


def test_two_ranks_agree_on_the_shorter_prefix(ranks, sidecar, model, tmp_path):
    """Each has its own heads. SGLang reduces by MIN over a real process group."""
    for i, rank in enumerate(ranks):
        options = {"rank": i, "num_ranks": 2, "group": str(tmp_path / "group"), "heads": 1}
        rank.send("ours", "open", layout="page_first", backend="dynamic", extra=ours(sidecar, model), **options)
    [rank.receive() for rank in ranks]
    tokens = prompt(9, 10)
    assert [rank("ours", "save", tokens=tokens[: n * PAGE]) for rank, n in zip(ranks, (10, 6), strict=True)] == [
        160,
        96,
    ]

    [rank.send("ours", "load", tokens=tokens) for rank in ranks]
    answers = [rank.receive() for rank in ranks]

    assert [all_right(answer) for answer in answers] == [6, 6]
    for rank in ranks:
        rank.send("ours", "close")
    [rank.receive() for rank in ranks]


def test_engines_of_other_tensor_parallelism_share_pages_by_heads(ranks, sidecar, model):
    first, second = ranks
    extra = ours(sidecar, model, tp_lcm_size=2)
    first("whole", "open", layout="page_head", backend="dynamic", extra=extra, heads=2)
    for i in range(2):
        options = {"rank": i, "num_ranks": 2, "heads": 1}
        second(f"half{i}", "open", layout="page_head", backend="dynamic", extra=extra, **options)
    tokens = prompt(20, 3)
    assert first("whole", "save", tokens=tokens) == 3 * PAGE

    halves = [second(f"half{i}", "page_bytes", tokens=tokens) for i in range(2)]

    for whole, *parts in zip(first("whole", "page_bytes", tokens=tokens), *halves, strict=True):
        k, v = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        for i, part in enumerate(parts):
            half = len(k) // 2
            assert part == k[i * half : (i + 1) * half] + v[i * half : (i + 1) * half]
    first("whole", "close")
    for i in range(2):
        second(f"half{i}", "close")


def opened(ranks, sidecar, model):
    """Both, with an engine each. The engine of the test before is closed."""
    for rank in ranks:
        rank("ours", "open", layout="page_first", backend="dynamic", extra=ours(sidecar, model))
    return ranks


def close(ranks):
    for rank in ranks:
        rank("ours", "close")


def all_right(answer):
    """Pages; all that were found were brought, and are right."""
    assert answer["found"] == answer["brought"] == answer["right"] * PAGE
    return answer["right"]


def until(condition):
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
