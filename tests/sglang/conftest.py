"""Everything here needs SGLang's package in the environment: make sglang-test."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# This folder's parent may be on the path, so that `sglang` alone could be this folder.
HAS_SGLANG = (found := find_spec("sglang")) is not None and found.origin is not None  # not imported: that takes a while
sys.path.insert(0, str(HERE.parent / "e2e"))  # sidecar_process


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("sglang")
            item.add_marker(pytest.mark.timeout(240))
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # SGLang's own
            if not HAS_SGLANG:
                item.add_marker(pytest.mark.skip(reason="sglang is not installed here; make sglang-test"))
