"""The text of one sample as its tokens come, up to the first stop string.

What may yet turn out to begin a stop string is held back, so that no reader ever sees a part of one. Where the text
stops does not depend on how it is cut into tokens: it is as if its characters came one by one.
"""

from typing import Protocol


class Decoder(Protocol):
    """tokenizer.StreamDecoder: tokens to characters."""

    def push(self, token_id: int) -> str:
        """The characters that the token completes."""
        ...

    def finish(self) -> str:
        """What is left at the end."""
        ...


class OutputText:
    """Takes tokens one by one; `stopped` once a stop string is complete, and then nothing more is added."""

    def __init__(self, decoder: Decoder, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self.text = ""  # what may be shown
        self._decoder = decoder
        self._stop = stop
        self._held = ""  # shorter than the longest stop string
        self._num_taken = 0

    def push(self, token_id: int) -> None:
        """Add a token."""
        self._add(self._decoder.push(token_id))

    def finish(self) -> None:
        """The last token was added: nothing is held back any more."""
        self._add(self._decoder.finish())
        self.text += self._held
        self._held = ""

    def take(self) -> str:
        """What came to `text` since the last call."""
        new = self.text[self._num_taken :]
        self._num_taken = len(self.text)
        return new

    def _add(self, new: str) -> None:
        if self.stopped:
            return
        seen, self._held = self._held + new, ""
        found = [(start + len(stop), start) for stop in self._stop if (start := seen.find(stop)) >= 0]
        if found:
            self.stopped = True
            self.text += seen[: min(found)[1]]
            return
        num_held = self._num_possible(seen)
        self.text += seen[: len(seen) - num_held]
        self._held = seen[len(seen) - num_held :]

    def _num_possible(self, seen: str) -> int:
        """Length of the longest end of `seen` that begins a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        lengths = range(min(longest, len(seen)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(seen[-n:]) for stop in self._stop)), 0)
