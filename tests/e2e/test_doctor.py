"""`kvstore doctor`, each environment broken for real: it says which check failed and what would be right, and exits with 1."""

import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sidecar_process import ROOT, SPEC, SidecarProcess, connected, running_sidecar

from kvstore.cli.main import cli
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.core.limits import MAX_NAMESPACES
from kvstore.doctor import check_hashes
from kvstore.tiers.host_memory import available_memory_bytes

DEADLINE_S = 30.0
NOBODY = 65534


Findings = dict[str, list[dict[str, str]]]


def doctor(*flags: str, **environ: str) -> tuple[int, Findings]:
    """Exit status, and findings by check."""
    ran = CliRunner().invoke(cli, ["doctor", "--json", *flags], env=environ, catch_exceptions=False)
    return ran.exit_code, by_check(ran.stdout)


def doctor_process(
    *flags: str, preexec_fn: Callable[[], None] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The same in an environment of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "doctor", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        timeout=DEADLINE_S,
        preexec_fn=preexec_fn,
        check=False,
    )


def by_check(printed: str) -> Findings:
    found: Findings = {}
    for finding in json.loads(printed)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_a_sound_environment(tmp_path: Path) -> None:
    with running_sidecar(tmp_path) as sidecar:
        status, found = doctor("--socket", str(sidecar.socket), "--nvme", str(tmp_path))

    assert status == 0
    for check in ("python", "packages", "memory", "socket", "sidecar", "arena", "hashes", f"drive {tmp_path}"):
        assert [each["level"] for each in found[check]] == ["ok"], found[check]
    assert found["arena"][0]["found"].startswith("0.02 GiB, 0 blocks")
    assert {"open files", "locked memory", "huge pages", "clock", "gpu", "rdma"} <= found.keys()
    assert all(each["right"] for findings in found.values() for each in findings if each["level"] != "ok")


def test_lines_for_people_say_the_same(tmp_path: Path) -> None:
    ran = doctor_process("--socket", str(tmp_path / "none.sock"))

    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].split(maxsplit=2) == [
        "problem",
        "socket",
        f"there is none at {tmp_path}/none.sock -> kvstore serve --socket {tmp_path}/none.sock",
    ]


def test_a_dead_sidecar_a_plain_file_and_no_socket_at_all_are_told_apart(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path / "kvstore.sock").start()
    sidecar.kill()
    (tmp_path / "file").write_text("")

    for name, words in (("kvstore.sock", "its sidecar has ended"), ("file", "is no socket"), ("none", "there is none")):
        status, found = doctor("--socket", str(tmp_path / name))

        assert status == 1
        assert words in found["socket"][0]["found"]
        assert "sidecar" not in found


def test_a_sidecar_that_hangs_is_a_problem_within_the_deadline(tmp_path: Path) -> None:
    with running_sidecar(tmp_path) as sidecar:
        os.kill(sidecar.pid, signal.SIGSTOP)
        status, found = doctor("--socket", str(sidecar.socket), "--deadline-s", "0.5")
        os.kill(sidecar.pid, signal.SIGCONT)

    assert status == 1
    assert found["sidecar"][0]["level"] == "problem"
    assert "timed out" in found["sidecar"][0]["found"] or "deadline" in found["sidecar"][0]["found"]


def test_something_else_that_listens_is_a_problem(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        status, found = doctor("--socket", str(tmp_path / "other.sock"), "--deadline-s", "0.3")

    assert status == 1
    assert found["sidecar"][0]["level"] == "problem"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_s_socket_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        os.chown(path, NOBODY, NOBODY)

        status, found = doctor("--socket", str(path))

    assert status == 1
    assert found["socket"][0]["found"] == f"{path} is user {NOBODY}'s, we are user 0"
    assert found["socket"][0]["right"] == "a sidecar of our own user or of root"


def test_few_files_and_little_locked_memory_are_warnings() -> None:
    def tighten() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    found = by_check(doctor_process("--json", preexec_fn=tighten).stdout)

    assert (found["open files"][0]["level"], found["open files"][0]["found"]) == ("warning", "200")
    assert found["open files"][0]["right"].startswith("ulimit -n 4096")
    locked = "ok" if os.geteuid() == 0 else "warning"  # root may lock what it likes
    assert (found["locked memory"][0]["level"], found["locked memory"][0]["found"]) == (locked, "65,536")


def test_a_kernel_that_does_not_tell_of_memory_is_a_problem_and_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for masked in ("missing", "empty"):
        proc = tmp_path / masked
        proc.mkdir()
        if masked == "empty":
            (proc / "meminfo").touch()
        monkeypatch.setattr("kvstore.doctor.available_memory_bytes", partial(available_memory_bytes, proc))

        status, found = doctor("--socket", str(tmp_path / "none.sock"))

        assert status == 1
        assert "meminfo" in found["memory"][0]["found"]
        assert found["socket"][0]["found"].startswith("there is none")


def test_a_drive_that_is_not_there_or_not_ours_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    status, found = doctor("--nvme", str(tmp_path / "none"), "--nvme", str(tmp_path / "file"))

    assert status == 1
    assert found[f"drive {tmp_path}/none"][0]["found"] == "No such file or directory"
    assert found[f"drive {tmp_path}/file"][0]["level"] == "problem"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_drives_of_the_environment_are_looked_at_and_wrong_settings_told(tmp_path: Path) -> None:
    _, found = doctor(KVSTORE_NVME=str(tmp_path))
    assert found[f"drive {tmp_path}"][0]["level"] == "ok"

    status, found = doctor(KVSTORE_ARENA_BYTES="much")
    assert status == 1
    assert found["settings"][0]["found"].startswith("arena_bytes: 'much' is not right")


def test_engines_that_hash_in_two_ways_are_named(tmp_path: Path) -> None:
    def of_seed(seed: str) -> HashScheme:
        return HashScheme(algorithm="engine:vllm-xxhash", seed=seed, digest_nbytes=16)

    with running_sidecar(tmp_path) as sidecar:
        specs = [replace(SPEC, hash=of_seed("0")), replace(SPEC, hash=of_seed("random:ab"))]
        with connected(sidecar, spec=specs[0]), connected(sidecar, spec=specs[1]):
            status, found = doctor("--socket", str(sidecar.socket))

    assert status == 0  # both may be meant
    assert found["hashes"][0]["level"] == "warning"
    assert "hash.seed '0' and 'random:ab'" in found["hashes"][0]["found"]
    assert "PYTHONHASHSEED" in found["hashes"][0]["right"]


def _without_rope(cls: Any, *, fields: Callable[[Any], tuple[Any, ...]] = dataclasses.fields) -> list[Any]:
    return [field for field in fields(cls) if field.name != "rope"]


def opaque(**changes: object) -> KVSpec:
    """As vLLM's on a CPU."""
    whole = {
        "page_format": "opaque:vllm",
        "stored_format": "opaque:vllm",
        "opaque_block_nbytes": 4096,
        "block_tokens": 32,
    }
    scheme = HashScheme(algorithm="engine:vllm-sha256", block_tokens=32, digest_nbytes=32)
    return replace(SPEC, **whole | {"hash": scheme} | changes)  # type: ignore[arg-type]  # fields of a spec


def test_engines_of_other_block_sizes_are_named_though_their_blocks_are_opaque() -> None:
    longer = replace(opaque().hash, block_tokens=64)
    (finding,) = check_hashes([opaque(), opaque(block_tokens=64, opaque_block_nbytes=8192, hash=longer)])

    assert finding.level == "warning"
    assert finding.found.endswith("do not share: block_tokens 32 and 64; hash.block_tokens 32 and 64")


def test_engines_with_other_bytes_a_token_are_none_of_the_hashes_concern() -> None:
    (finding,) = check_hashes(
        [opaque(), opaque(opaque_block_nbytes=8192), opaque(page_format="opaque:b", stored_format="opaque:b")]
    )

    assert finding.level == "ok"


def test_as_many_namespaces_as_a_sidecar_takes_are_compared_at_once() -> None:
    seeds = [replace(opaque().hash, seed=f"random:{i}") for i in range(MAX_NAMESPACES)]
    specs = [opaque(hash=seed) for seed in seeds]

    started_s = time.monotonic()
    (finding,) = check_hashes(specs)

    assert "hash.seed 'random:0' and 'random:1'" in finding.found
    assert time.monotonic() - started_s < 5.0  # by pairs it took minutes


def test_an_engine_of_another_version_whose_spec_cannot_be_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_sidecar(tmp_path) as sidecar, connected(sidecar):
        monkeypatch.setattr(dataclasses, "fields", _without_rope)  # this side knows a field less
        status, found = doctor("--socket", str(sidecar.socket))

    assert status == 1
    assert found["hashes"][0]["found"] == "rope: not a field of the spec"


def test_engines_of_other_weights_may_hash_as_they_like(tmp_path: Path) -> None:
    other = replace(SPEC, weights="others", hash=HashScheme(seed="1"))
    with running_sidecar(tmp_path) as sidecar, connected(sidecar), connected(sidecar, spec=other):
        _, found = doctor("--socket", str(sidecar.socket))

    assert found["hashes"][0]["level"] == "ok"


def test_a_package_of_another_version_than_was_tried_is_a_warning(tmp_path: Path) -> None:
    for name, version in (("sglang", "0.4.1"), ("vllm", "0.32.1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    found = by_check(doctor_process("--json", PYTHONPATH=f"{ROOT}:{tmp_path}", PYTHONHASHSEED="random").stdout)

    assert found["sglang"][0] == {
        "check": "sglang",
        "level": "warning",
        "found": "0.4.1",
        "right": "the connector was run with 0.5.23; an engine may refuse it",
    }
    assert found["vllm"][0]["level"] == "ok"
    assert (found["hash seed"][0]["level"], found["hash seed"][0]["found"]) == ("warning", "PYTHONHASHSEED=random")
