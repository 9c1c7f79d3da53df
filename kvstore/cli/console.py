"""Where tables go: as wide as the terminal, or as they need when nobody's terminal cuts them."""

from typing import Any

_PIPED_WIDTH = 500


def wide_console() -> Any:
    """A rich Console. Into a pipe or a file lines are as long as they are; a terminal folds what does not fit."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def ago(age_s: float) -> str:
    """A time that has passed, or a length of time."""
    if age_s < 120:
        return f"{age_s:.1f} s"
    if age_s < 7200:
        return f"{age_s / 60:.0f} min"
    return f"{age_s / 3600:.0f} h" if age_s < 172_800 else f"{age_s / 86_400:.0f} days"
