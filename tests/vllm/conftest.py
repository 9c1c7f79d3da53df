"""Everything here needs vLLM in the environment: make vllm-test."""

import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from servers import Sidecar, Slow

HERE = Path(__file__).parent
# Where the parent of this folder is on the path, a `vllm` without a file is this folder. Not imported, lest it is taken for vLLM.
HAS_VLLM = (found := find_spec("vllm")) is not None and found.origin is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(1800))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed here; make vllm-test"))


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvstore-vllm-"))  # short enough for a Unix socket
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath / ".cache" / "vllm"


@pytest.fixture(scope="module")
def sidecar(directory: Path) -> Iterator[Sidecar]:
    """Not started."""
    sidecar = Sidecar(directory)
    yield sidecar
    sidecar.kill()


@pytest.fixture(scope="module")
def slow(directory: Path) -> Slow:
    return Slow(directory)
