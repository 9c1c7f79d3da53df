"""Helpers of tests/e2e that contract tests use too: real servers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "e2e"))
