"""Everything here needs vLLM in the environment: make vllm-test."""

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# This folder's parent may be on the path, so that `vllm` alone could be this folder.
HAS_VLLM = find_spec("vllm") is not None and find_spec("vllm.v1") is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(600))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed here; make vllm-test"))
