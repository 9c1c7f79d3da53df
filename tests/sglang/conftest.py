"""Everything here needs SGLang's package in the environment: make sglang-test."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "e2e"))  # sidecar_process
# This folder's parent may be on the path, so that `sglang` alone could be this folder.
HAS_SGLANG = find_spec("sglang") is not None and (find_spec("sglang").origin or "").endswith("__init__.py")
collect_ignore = [] if HAS_SGLANG else [path.name for path in HERE.glob("test_*.py")]


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("sglang")
            item.add_marker(pytest.mark.timeout(120))
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # SGLang's own
