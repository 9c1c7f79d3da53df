"""What the command line settles."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Of either demo."""

    model: Path
    arena: str
    prompt_tokens: int
    max_tokens: int
    log_dir: Path | None  # None: logs go to the run's own folder and vanish with it
