"""A collector that keeps the spans it is sent: HTTP, protobuf, as the OTLP specification has them."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_S = 15.0
MUCH_BYTES = 1 << 28


@dataclass(frozen=True)
class Received:
    """A span, with whose it is."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def process(self) -> tuple[str, str]:
        """Service and instance."""
        return self.resource["service.name"], self.resource.get("service.instance.id", "")


class Collector:
    def __init__(self, *, hangs: bool = False, endless: bool = False, moved: bool = False) -> None:
        """`hangs`: takes every request and answers none, until it is closed. `endless`: answers that it has them, and goes on
        for as long as anybody reads. `moved`: says that another place takes them."""
        self.spans: list[Received] = []
        self.num_requests = 0
        self.num_answered_bytes = 0  # of what has no end
        self._changed = threading.Condition()
        self._closing = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.num_requests += 1
                if hangs:
                    collector._closing.wait()
                    return
                if moved:
                    self.send_response(307)
                    self.send_header("Location", "/elsewhere")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector._take(ExportTraceServiceRequest.FromString(body))
                if endless:
                    self._answer_without_end()
                    return
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _answer_without_end(self) -> None:
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the reader has enough
                    while collector.num_answered_bytes < MUCH_BYTES:
                        collector.num_answered_bytes += self.wfile.write(bytes(1 << 16))

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def wait_for(self, *names: str, trace_id: str) -> dict[str, Received]:
        """Spans of a trace by name, once these have all come. Of several with one name the last that began."""
        with self._changed:
            come = self._changed.wait_for(lambda: set(names) <= self._of(trace_id).keys(), WAIT_S)
            found = self._of(trace_id)
        assert come, f"of {sorted(names)} only {sorted(found)} within {WAIT_S} s"
        return found

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def _of(self, trace_id: str) -> dict[str, Received]:
        return {
            each.name: each for each in sorted(self.spans, key=lambda each: each.start_ns) if each.trace_id == trace_id
        }

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for whole in request.resource_spans:
                resource = _values(whole.resource.attributes)
                self.spans += [
                    Received(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.kind,
                        _values(span.attributes),
                        resource,
                    )
                    for scope in whole.scope_spans
                    for span in scope.spans
                ]
            self._changed.notify_all()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextlib.contextmanager
def running_collector(**how: bool) -> Iterator[Collector]:
    with contextlib.closing(Collector(**how)) as collector:
        yield collector


def traceparent(number: int, *, sampled: bool = True) -> tuple[str, str, str]:
    """One for a test: the text, its trace and its span."""
    trace_id, span_id = f"{time.time_ns():016x}{number:016x}", f"{number:016x}"
    return f"00-{trace_id}-{span_id}-{int(sampled):02x}", trace_id, span_id
