"""Fixtures of the tests that run engines on a real sidecar. The tiny model is shared with tests/engine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parent.parent / "engine"))

if TYPE_CHECKING:
    from engines import Bench
    from sidecar_process import SidecarProcess


@pytest.fixture(scope="module")
def bench_of_module(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Bench]":
    """The model, loaded once for a file."""
    from engines import open_bench  # torch, which not every test here needs

    with open_bench(tmp_path_factory.mktemp("model")) as bench:
        yield bench


@pytest.fixture
def bench(bench_of_module: "Bench") -> "Iterator[Bench]":
    """Makes engines, which are closed when the test is over."""
    with bench_of_module.own_engines():
        yield bench_of_module


@pytest.fixture
def sidecar(tmp_path: Path) -> "Iterator[SidecarProcess]":
    """One without drives; files that want another have their own."""
    from sidecar_process import running_sidecar

    with running_sidecar(tmp_path, "--no-grpc") as process:
        yield process
