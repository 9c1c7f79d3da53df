"""Traces of requests: the W3C trace context as the text that travels, and what whoever makes spans needs of a tracer.

A `traceparent` names a span: `00-<trace, 32 hex digits>-<span, 16>-<flags, 2>` (W3C Trace Context, section 3.2). "" is none.
"""

import re
from collections.abc import Mapping
from typing import Protocol

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool
Attributes = Mapping[str, Value]


def read_traceparent(text: str) -> str:
    """What came from outside, if it is one; else "": the standard has whoever receives nonsense go on without."""
    return text if _TRACEPARENT.fullmatch(text) else ""


class Span(Protocol):
    """Something that takes time, in one request."""

    @property
    def traceparent(self) -> str:
        """By which others make spans below it; "" when it is not recorded, so that nobody does."""
        ...

    def end(self, attributes: Attributes, *, at_s: float | None = None) -> None:
        """Once. `at_s`: on time.monotonic(); None: now. Never blocks; a span that finds no room is dropped and counted."""
        ...


class Tracer(Protocol):
    """Makes spans. Any thread; no call waits for anything."""

    def start(self, name: str, traceparent: str, *, at_s: float | None = None, kind: str = "internal") -> Span:
        """A span below `traceparent`; without one it begins a trace. `kind`: internal, server (it answers another process) or
        client (it asks one)."""
        ...

    def counts(self) -> dict[str, int]:
        """Spans since start: exported, dropped (the queue was full), failed (the collector did not take them)."""
        ...
