"""Everything here needs a GPU: make gpu-test. Cases and models are shared with tests/unit and tests/engine."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "unit"), str(HERE.parent / "engine")]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="this torch finds no GPU; make gpu-test on a machine with one"))
