"""The sidecar's small HTTP port, in threads of its own.

/metrics   for Prometheus
/healthz   200 while the brain loop answers
/          the dashboard, with /web/... and /api/... (kvstore/dashboard.py)
/readyz    JSON: whether engines are served, the state of each tier and drive, and what is wrong, by name (kvstore/health.py).
           503 when the loop is stuck (loop_stuck). Any other problem is told and takes nothing from our being ready: engines
           are served from what is left
"""

import errno
import gzip
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.dashboard import Answer, Dashboard
from kvstore.metrics import StatsCollector, tier_state
from kvstore.proto import kvstore_pb2 as pb

_REQUEST_DEADLINE_S = 10.0
_GZIP_FROM_BYTES = 1400  # what fits a packet is sent as it is
_GZIP_LEVEL = 5
_BROWSER_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_HOST_ERRORS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Page(NamedTuple):
    """An answer."""

    content_type: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK


class HttpServer:
    """Serves on `host:port` from `start` to `stop`. `snapshot` is asked once for each request, on the request's thread; it
    raises a KVStoreError when the brain loop does not answer."""

    def __init__(
        self, host: str, port: int, snapshot: Callable[[], pb.StatsReply], dashboard: Dashboard | None = None
    ) -> None:
        self._host, self._port = host, port
        self._dashboard = dashboard
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
        """Bind and serve in the background. Raises ConfigError, which names metrics_host or metrics_port."""
        pages = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._ready}

        class Handler(_Handler):
            routes = pages
            dashboard = self._dashboard.pages() if self._dashboard else {}

        family, address = self._resolve()

        class Server(ThreadingHTTPServer):
            address_family = family

        try:
            self._server = Server(address, Handler)
        except OSError as err:
            raise self._unusable("metrics_host" if err.errno in _HOST_ERRORS else "metrics_port", err) from err
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="kvstore-http", daemon=True).start()

    def stop(self) -> None:
        """Stop serving; blocks at most half a second."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def _resolve(self) -> tuple[socket.AddressFamily, Any]:
        """The host's first address, of either family; "" is every address of this machine."""
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self._host or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError) as err:  # gaierror is an OSError; UnicodeError: no host name could be so
            raise self._unusable("metrics_host", err) from err
        return family, address

    def _unusable(self, field: str, err: Exception) -> ConfigError:
        reason = (err.strerror if isinstance(err, OSError) else None) or str(err)
        return ConfigError(
            f"{field}: cannot listen on host {self._host!r}, port {self._port}: {reason}",
            field=field,
            value=self._host if field == "metrics_host" else self._port,
        )

    def _metrics(self) -> Page:
        return Page(CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _health(self) -> Page:
        self._snapshot()
        return Page("text/plain; charset=utf-8", b"ok\n")

    def _ready(self) -> Page:
        try:
            stats = self._snapshot()
        except KVStoreError as err:
            stuck = {"problem": "loop_stuck", "subject": "", "reason": err.message}
            return _json({"ready": False, "reason": err.message, "problems": [stuck]}, HTTPStatus.SERVICE_UNAVAILABLE)
        problems = [
            {"problem": each.problem, "subject": each.subject, "reason": each.reason} for each in stats.problems
        ]
        tiers = {tier.name: _readiness(tier) for tier in stats.tiers}
        return _json({"ready": True, "problems": problems, "tiers": tiers})


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Page:
    return Page("application/json", json.dumps(value).encode() + b"\n", status)


def _readiness(tier: pb.TierStats) -> dict[str, object]:
    readiness: dict[str, object] = {"state": tier_state(tier)}
    if tier.drives:
        readiness["drives"] = [
            {"path": drive.path, "state": drive.state, "reason": drive.reason} for drive in tier.drives
        ]
    return readiness


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_DEADLINE_S
    routes: dict[str, Callable[[], Page]]
    dashboard: dict[str, Callable[[Mapping[str, str]], Answer]]

    def do_GET(self) -> None:
        """One of the routes, 404, or 503 when the brain loop does not answer."""
        path, _, query = self.path.partition("?")
        route, view = self.routes.get(path), self.dashboard.get(path)
        if route is None and view is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            if route is None:
                assert view is not None
                self._send_to_browser(view(dict(parse_qsl(query))))
                return
            page = route()
        except KVStoreError as err:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, err.message)
            return
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        self.wfile.write(page.body)

    def _send_to_browser(self, answer: Answer) -> None:
        body = answer.body
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", answer.content_type)
        if len(body) >= _GZIP_FROM_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=300" if answer.static else "no-store")
        self.send_header("Vary", "Accept-Encoding")
        for name, value in _BROWSER_HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are no news."""
