"""Spans to an OpenTelemetry collector (extra `trace`). Import it through kvstore/tracing.py, when tracing is on.

Set up by the environment as everywhere: OTEL_EXPORTER_OTLP_ENDPOINT and _HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER, OTEL_BSP_MAX_QUEUE_SIZE and the like. OTLP over HTTP: the standard's default, and it brings no gRPC
threads into engines that fork.

    any thread    span.end -> bounded queue, or dropped and counted
    one thread    batches -> collector; what it does not take in time is lost and counted

The SDK's own batch processor does the same but for the counting.
"""

import io
import logging
import os
import threading
import time
from collections import Counter, deque
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvstore.core.errors import ConfigError
from kvstore.core.traces import Attributes

logger = logging.getLogger(__name__)

_MAX_QUEUE = 2048  # spans; the SDK's defaults, of this and of what follows
_MAX_BATCH = 512
_DELAY_MS = 5000
_MAX_ANSWER_BYTES = 1 << 16
_OWN_SESSIONS = tuple(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{of}CREDENTIAL_PROVIDER" for of in ("", "TRACES_"))
_MOST = (1 << 31) - 1  # of any setting: 24 days
_CONTEXTS = TraceContextTextMapPropagator()
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_NO_PARENT = Context()


class OtelTracer:
    """Implements core.traces.Tracer. `close` it: what is queued then still goes out, within a deadline."""

    def __init__(self, service_name: str, attributes: Attributes) -> None:
        """Starts the exporter's thread. Raises ConfigError, and the SDK's ValueError, of variables that are not right."""
        ours = Resource.create({"service.name": service_name, **attributes})
        provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        has_own = any(map(os.environ.get, _OWN_SESSIONS))
        self._queue = ExportQueue(OTLPSpanExporter(session=None if has_own else _Session()))
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("kvstore")

    def start(self, name: str, traceparent: str, *, at_s: float | None = None, kind: str = "internal") -> "OpenSpan":
        """See core.traces.Tracer."""
        above = _CONTEXTS.extract({"traceparent": traceparent}, _NO_PARENT) if traceparent else _NO_PARENT
        return OpenSpan(self._tracer.start_span(name, above, _KINDS[kind], start_time=_wall_ns(at_s)))

    def counts(self) -> dict[str, int]:
        """See core.traces.Tracer."""
        return self._queue.counts()

    def close(self, deadline_s: float) -> None:
        """Send what is queued, for at most so long. Blocks. Safe to call twice."""
        self._queue.close(deadline_s)


class OpenSpan:
    """Implements core.traces.Span."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: OtelSpan) -> None:
        carrier: dict[str, str] = {}
        if span.is_recording():
            _CONTEXTS.inject(carrier, set_span_in_context(span, _NO_PARENT))
        self._span = span
        self.traceparent = carrier.get("traceparent", "")

    def end(self, attributes: Attributes, *, at_s: float | None = None) -> None:
        """See core.traces.Span."""
        self._span.set_attributes(dict(attributes))
        self._span.end(_wall_ns(at_s))


class _Session(requests.Session):
    """Of any answer the status and a piece are read: the SDK would take all that comes into memory, without end. It also takes a
    redirect for success, and does not follow it."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        answer = super().send(request, **{**kwargs, "stream": True})
        piece = answer.raw.read(_MAX_ANSWER_BYTES)
        answer.close()
        answer.raw = io.BytesIO(piece)
        if answer.is_redirect:
            where = answer.headers["location"]
            raise requests.TooManyRedirects(f"the collector answers {answer.status_code}: ask {where}", response=answer)
        return answer


class ExportQueue(SpanProcessor):
    """Hands ended spans to `exporter`, which it owns, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._max_queue = _setting("OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUE)
        self._max_batch = min(self._max_queue, _setting("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _MAX_BATCH))
        self._delay_s = _setting("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS) / 1e3
        self._spans: deque[ReadableSpan] = deque()
        self._num_sending = 0
        self._counts = Counter(exported=0, dropped=0, failed=0)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-traces", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """See core.traces.Tracer."""
        with self._changed:
            return dict(self._counts)

    def on_end(self, span: ReadableSpan) -> None:
        """Any thread. The lock is held for moments only, never while something is sent."""
        if not span.context.trace_flags.sampled:
            return
        with self._changed:
            if self._closing or len(self._spans) == self._max_queue:
                self._counts["dropped"] += 1
                return
            self._spans.append(span)
            if len(self._spans) == self._max_batch:
                self._changed.notify()

    def close(self, deadline_s: float) -> None:
        """Send what is queued, for at most so long; what is not sent then has failed."""
        if self._closing:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(deadline_s)
        self._exporter.shutdown()  # a retry that goes on ends
        with self._changed:
            self._counts["failed"] += self._num_sending + len(self._spans)
            self._num_sending = 0
            self._spans.clear()
        logger.info("traces ended %s", " ".join(f"{name}={count}" for name, count in self.counts().items()))

    def _run(self) -> None:
        while batch := self._next():
            try:
                sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except (
                Exception
            ):  # outermost frame of an export: whatever a collector or a proxy does, spans are all that is lost
                logger.exception("export crashed")
                sent = False
            with self._changed:
                self._counts["exported" if sent else "failed"] += self._num_sending
                self._num_sending = 0

    def _next(self) -> list[ReadableSpan]:
        """A batch, full or after the delay; none: it is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self._spans) >= self._max_batch, self._delay_s)
            while not (self._spans or self._closing):
                self._changed.wait(self._delay_s)
            self._num_sending = min(len(self._spans), self._max_batch)
            return [self._spans.popleft() for _ in range(self._num_sending)]


def _wall_ns(at_s: float | None) -> int:
    """The time of day of a moment on the monotonic clock."""
    return time.time_ns() if at_s is None else time.time_ns() - int((time.monotonic() - at_s) * 1e9)


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MOST)) and 0 < int(text) <= _MOST):
        raise ConfigError(f"{name}: {text:.40} is not right; use 1 to {_MOST}", field=name, value=text[:40])
    return int(text)
