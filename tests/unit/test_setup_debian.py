"""tests/setup_debian.sh: it installs what is missing, once, and never stops a set-up."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "setup_debian.sh"
TOOLS = ("mkdir", "rm", "tail", "timeout")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that is the whole PATH: what the script itself needs, and a user who is root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(f"/usr/bin/{name}")
    program(folder, "id", "echo 0")
    return folder


def program(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def set_up(programs: Path, folder: Path) -> str:
    run = subprocess.run(
        ["/bin/sh", SCRIPT],
        check=False,
        env={"PATH": str(programs)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (run.returncode, run.stdout) == (0, "")
    return run.stderr


def test_nothing_is_done_where_everything_is_there(programs: Path, tmp_path: Path) -> None:
    for name in ("redis-server", "redis-cli", "ip", "tc", "openssl", "promtool", "chromium"):
        program(programs, name, "exit 0")
    program(programs, "apt-get", "echo asked >&2; exit 1")

    assert set_up(programs, tmp_path) == ""
    assert not (tmp_path / ".cache").exists()


def test_only_what_is_missing_is_installed(programs: Path, tmp_path: Path) -> None:
    for name in ("redis-server", "redis-cli", "openssl", "promtool", "chromium"):
        program(programs, name, "exit 0")
    program(programs, "apt-get", f'echo "$@" >>{tmp_path}/asked')

    assert set_up(programs, tmp_path) == ""

    update, *installs = (tmp_path / "asked").read_text().splitlines()
    assert update.endswith("update")
    assert [install.rpartition(" install ")[2] for install in installs] == ["-y --no-install-recommends iproute2"] * 2
    assert not (tmp_path / ".cache/setup_debian").exists()


def test_a_mirror_that_does_not_answer_is_told_and_asked_once(programs: Path, tmp_path: Path) -> None:
    program(programs, "apt-get", f"echo once >>{tmp_path}/asked; echo 'E: no mirror'; exit 100")

    first = set_up(programs, tmp_path)
    asked = (tmp_path / "asked").read_text()
    second = set_up(programs, tmp_path)

    assert "missing redis-server redis-tools" in first
    assert "apt-get could not install them: E: no mirror" in first
    assert "they could not be installed before" in second
    assert (tmp_path / "asked").read_text() == asked


@pytest.mark.parametrize(
    ("name", "body", "reason"), [("id", "echo 1000", "this user"), ("sh", "", "there is no apt-get")]
)
def test_who_may_not_install_is_told(programs: Path, tmp_path: Path, name: str, body: str, reason: str) -> None:
    program(programs, name, body)

    assert reason in set_up(programs, tmp_path)
