"""The sidecar's small HTTP port: /metrics and /healthz, in threads of their own."""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.metrics import StatsCollector
from kvstore.proto import kvstore_pb2 as pb

_REQUEST_DEADLINE_S = 10.0


class HttpServer:
    """Serves on `host:port` from `start` to `stop`. `snapshot` is asked once for each request, on the request's thread; it
    raises a KVStoreError when the brain loop does not answer."""

    def __init__(self, host: str, port: int, snapshot: Callable[[], pb.StatsReply]) -> None:
        self._address = host, port
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(StatsCollector(snapshot))
        self._server: ThreadingHTTPServer | None = None

    @property
    def port(self) -> int:
        """The port that was bound."""
        assert self._server is not None
        return self._server.server_port

    def start(self) -> None:
        """Bind and serve in the background. Raises ConfigError."""
        pages: dict[str, Callable[[], tuple[str, bytes]]] = {"/metrics": self._metrics, "/healthz": self._health}

        class Handler(_Handler):
            routes = pages

        host, port = self._address
        try:
            self._server = ThreadingHTTPServer(self._address, Handler)
        except OSError as err:
            raise ConfigError(
                f"metrics_port: cannot listen on {host}:{port}: {err.strerror}", field="metrics_port", value=port
            ) from err
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="kvstore-http", daemon=True).start()

    def stop(self) -> None:
        """Stop serving; blocks at most half a second."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def _metrics(self) -> tuple[str, bytes]:
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def _health(self) -> tuple[str, bytes]:
        self._snapshot()
        return "text/plain; charset=utf-8", b"ok\n"


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_DEADLINE_S
    routes: dict[str, Callable[[], tuple[str, bytes]]]

    def do_GET(self) -> None:
        """One of the routes, 404, or 503 when the brain loop does not answer."""
        page = self.routes.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            content_type, body = page()
        except KVStoreError as err:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, err.message)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are no news."""
