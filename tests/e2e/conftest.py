"""The engine's tiny model is shared with tests/engine."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "engine"))
