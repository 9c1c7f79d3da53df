"""How far a move by layers is: what one thread says of it, and another waits for."""

import threading

ALL_LAYERS = 1 << 30
"""More than any model has."""


class LayerProgress:
    """Of one move: the number of layers that are there. It only grows, until the move ends, well or not; nobody waits for one
    that has ended. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_layers = 0
        self._ended = False

    def advance(self, num_layers: int) -> None:
        """So many layers are there. Nothing happens when the move has ended."""
        with self._changed:
            if not self._ended:
                self._num_layers = max(self._num_layers, num_layers)
                self._changed.notify_all()

    def end(self, num_layers: int) -> None:
        """No more comes, and `num_layers` is all that is there: ALL_LAYERS, or 0 for a move that failed. The first end counts."""
        with self._changed:
            if not self._ended:
                self._num_layers, self._ended = num_layers, True
                self._changed.notify_all()

    def wait(self, num_layers: int, timeout_s: float) -> bool:
        """Whether so many layers are there, now or within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._num_layers >= num_layers, max(0.0, timeout_s))
            return self._num_layers >= num_layers
