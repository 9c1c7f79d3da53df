"""Where tables go: as wide as the terminal, or as they need when nobody's terminal cuts them."""

from typing import Any

_PIPED_WIDTH = 500


def wide_console() -> Any:
    """A rich Console that takes text as it is, square brackets too. Into a pipe or a file lines are as long as they are; a
    terminal folds what does not fit."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH)


def shown(text: str) -> str:
    """What others named (tenants, requests, prompts), on one line and harmless to a terminal: escapes for what is not printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def ago(age_s: float) -> str:
    """A time that has passed, or a length of time."""
    if age_s < 120:
        return f"{age_s:.1f} s"
    if age_s < 7200:
        return f"{age_s / 60:.0f} min"
    return f"{age_s / 3600:.0f} h" if age_s < 172_800 else f"{age_s / 86_400:.0f} days"
