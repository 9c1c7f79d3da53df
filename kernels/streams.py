"""Queues of work on a device; on the host, where Triton's interpreter runs, queues whose work is done when it has been queued.

So the code that moves blocks is the same on both, and its tests need no GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a queue; waiting for one that was never recorded waits for nothing."""

    def record(self, stream: "Stream") -> None:
        """At the queue's end as it is now."""
        ...


class Stream(Protocol):
    """The part of torch.cuda.Stream that is used here."""

    def wait_stream(self, stream: "Stream") -> None:
        """What is queued here from now on begins after all that is queued there now."""
        ...

    def wait_event(self, event: Event) -> None:
        """Likewise, after the event."""
        ...

    def synchronize(self) -> None:
        """Block until all that is queued is done. Releases the GIL."""
        ...


class HostEvent:
    """See Event."""

    def record(self, stream: Stream) -> None:
        """Nothing is outstanding."""


class HostStream:
    """See Stream."""

    def wait_stream(self, stream: Stream) -> None:
        """Nothing is outstanding."""

    def wait_event(self, event: Event) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""


def new_stream(device: torch.device) -> Stream:
    """A queue of its own."""
    return torch.cuda.Stream(device) if device.type == "cuda" else HostStream()  # type: ignore[no-untyped-call, unused-ignore, return-value]


def current_stream(device: torch.device) -> Stream:
    """The calling thread's."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else HostStream()  # type: ignore[return-value, unused-ignore]


def new_event(device: torch.device) -> Event:
    """Without a time."""
    return torch.cuda.Event() if device.type == "cuda" else HostEvent()  # type: ignore[no-untyped-call, unused-ignore, return-value]


def on(stream: Stream) -> AbstractContextManager[object]:
    """Queue there, and on its device, what the block queues."""
    return nullcontext() if isinstance(stream, HostStream) else torch.cuda.stream(stream)  # type: ignore[arg-type]
