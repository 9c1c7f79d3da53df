"""What the demo is doing: a live line on a terminal, one line a step elsewhere. Always on standard error."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

_REFRESH_PER_SECOND = 4  # the spinner shares two cores with what is being measured


@dataclass(slots=True)
class Step:
    """A step under way; `result` is shown when it has ended."""

    result: str = ""


class Progress:
    """Announces steps on `console`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        """Say something once."""
        self._console.print(f"  {text}", highlight=False)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Step]:
        """Show `text` while the block runs, and how it ended afterwards."""
        step, started_s = Step(), time.monotonic()
        with self._console.status(text, refresh_per_second=_REFRESH_PER_SECOND):
            yield step
        took = f"{time.monotonic() - started_s:.1f} s"
        self._console.print(f"  {text} [dim]({took}){'  ' + step.result if step.result else ''}[/dim]", highlight=False)
