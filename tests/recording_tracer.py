"""A tracer that keeps what it was told: core.traces.Tracer without OpenTelemetry."""

from dataclasses import dataclass, field
from typing import Any

from kvstore.core.traces import Attributes, read_traceparent

ABOVE = f"00-{7:032x}-{9:016x}-01"
"""Of somebody who asks."""


@dataclass(eq=False)
class RecordedSpan:
    name: str
    above: str  # traceparent
    traceparent: str
    at_s: float | None
    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    end_s: float | None = None

    def end(self, attributes: Attributes, *, at_s: float | None = None) -> None:
        assert not self.ended
        self.attributes, self.ended, self.end_s = dict(attributes), True, at_s


class RecordingTracer:
    def __init__(self, *, samples: bool = True) -> None:
        self.spans: list[RecordedSpan] = []
        self._samples = samples

    def start(self, name: str, traceparent: str, *, at_s: float | None = None, kind: str = "internal") -> RecordedSpan:
        assert traceparent == read_traceparent(traceparent)
        own = f"00-{7:032x}-{len(self.spans) + 100:016x}-01" if self._samples else ""
        span = RecordedSpan(name, traceparent, own, at_s, kind)
        self.spans.append(span)
        return span

    def counts(self) -> dict[str, int]:
        return {"exported": len(self.spans), "dropped": 0, "failed": 0}

    def named(self, name: str) -> list[RecordedSpan]:
        return [span for span in self.spans if span.name == name]
