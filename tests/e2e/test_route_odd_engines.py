"""`kvstore route` between clients and engines that do not keep to HTTP, or to what was meant."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from routers import routing

pytestmark = pytest.mark.e2e
WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
DEADLINE_S = 10.0

Reply = Callable[[socket.socket], None]


class RawEngine:
    """Answers health checks, and every other request with `reply`. `heads`: of those requests."""

    def __init__(self, reply: Reply) -> None:
        self.heads: list[bytes] = []
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):  # the router closes when it has seen enough
            sock.settimeout(DEADLINE_S)
            head = read_head(sock)
            if head.startswith(b"GET /v1/models "):
                sock.sendall(WELL)
            else:
                self.heads.append(head)
                self._reply(sock)


def read_head(sock: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and (more := sock.recv(65536)):
        head += more
    return head


@contextlib.contextmanager
def raw_engine(*parts: bytes) -> Iterator[RawEngine]:
    """One that sends these bytes, with a pause before each but the first."""

    def reply(sock: socket.socket) -> None:
        for number, part in enumerate(parts):
            time.sleep(0.2 if number else 0.0)
            sock.sendall(part)

    engine = RawEngine(reply)
    try:
        yield engine
    finally:
        engine.close()


def ask(url: str, target: str) -> tuple[int, bytes]:
    """GET with this request target, as it is; status and body."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), DEADLINE_S) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while more := sock.recv(65536):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_a_refusal_in_two_parts_is_passed_on_whole() -> None:
    body = json.dumps({"error": {"message": "the queue is full"}}).encode()
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with raw_engine(head + body[:10], body[10:]) as engine, routing(engine.url) as router:
        assert ask(router.url, "/v1/files") == (429, body)


def test_a_refusal_that_breaks_off_or_does_not_end_is_told_in_our_words() -> None:
    half = b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\n{"
    endless = b"HTTP/1.1 503 Busy\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000000)
    for answer in (half, endless):
        with raw_engine(answer) as engine, routing(engine.url) as router:
            status, body = ask(router.url, "/v1/files")
            assert status == 503
            assert engine.url in json.loads(body)["error"]["message"]


def test_a_target_with_a_host_is_asked_of_the_engine_all_the_same() -> None:
    with raw_engine(WELL) as engine, routing(engine.url) as router:
        assert ask(router.url, "http://elsewhere:1/v1/files?x=%2F") == (200, b"{}")
    (head,) = engine.heads
    assert head.startswith(b"GET /v1/files?x=%2F HTTP/1.1\r\n")
    assert b"elsewhere" not in head


@pytest.mark.parametrize(
    "target", ["/v1/../admin", "/v1/%2e%2e/admin", "/v1/..%2Fadmin", "/v1/%252e%252E/admin", "/v1/a/..%5Cb", "/v1/./x"]
)
def test_no_path_leads_out_of_v1(target: str) -> None:
    with raw_engine(WELL) as engine, routing(engine.url) as router:
        status, _ = ask(router.url, target)
    assert status == 400
    assert engine.heads == []


def test_dots_within_a_name_are_no_steps() -> None:
    with raw_engine(WELL) as engine, routing(engine.url) as router:
        assert ask(router.url, "/v1/models/Llama-3.1..v2?path=../x") == (200, b"{}")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 O\x01K\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nX-Odd: a\x01b\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_told_as_the_engines_failure(answer: bytes) -> None:
    with raw_engine(answer) as engine, routing(engine.url) as router:
        status, body = ask(router.url, "/v1/files")
        assert status == 502
        assert json.loads(body)["error"]["code"] == "engine_failed"
        router.wait_idle()
