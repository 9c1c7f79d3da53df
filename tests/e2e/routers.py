"""Routers and fake engines for tests: real sockets, the engines in processes that can be killed."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sidecar_process import read_line, wait_until

from kvstore.route.server import Router, RouterConfig

ROOT = Path(__file__).parent.parent.parent
START_DEADLINE_S = 20.0
CALL_DEADLINE_S = 20.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    @property
    def events(self) -> list[Any]:
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def call(url: str, path: str, body: Any = None, **headers: str) -> Answer:
    """A request with everything it brings, read to its end. Raises IncompleteRead for an answer that is cut off."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=CALL_DEADLINE_S) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as err:
        with err:
            return Answer(err.code, dict(err.headers), err.read())


def chat(text: str, *, tokens: int = 4, stream: bool = True) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": stream,
    }


class FakeEngineProcess:
    """`python -m benchmarks.fake_engine`."""

    def __init__(self, *, port: int = 0, prefill_s: float = 1e-6, token_s: float = 1e-3) -> None:
        options = ["--port", str(port), "--prefill-s", str(prefill_s), "--token-s", str(token_s)]
        command = [sys.executable, "-m", "benchmarks.fake_engine", *options]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.url = ""

    def wait_ready(self) -> "FakeEngineProcess":
        self.url = read_line(self._child, START_DEADLINE_S).rpartition("url=")[2]
        return self

    @property
    def state(self) -> dict[str, int]:
        return json.loads(call(self.url, "/state").body)

    def kill(self) -> None:
        """kill -9. Idempotent."""
        self._child.kill()
        self._child.wait(10)
        assert self._child.stdout is not None
        self._child.stdout.close()


@contextlib.contextmanager
def fake_engines(count: int, **options: float) -> Iterator[list[FakeEngineProcess]]:
    made = [FakeEngineProcess(**options) for _ in range(count)]
    try:
        yield [engine.wait_ready() for engine in made]
    finally:
        for engine in made:
            engine.kill()


class RunningRouter:
    """A Router in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    def metric(self, name: str, **labels: str) -> float:
        """Sum over what has these labels."""
        text = call(self.url, "/metrics").body.decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = re.findall(rf"^kvstore_route_{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for given, value in lines if all(want in given for want in wanted))

    @property
    def ready(self) -> dict[str, Any]:
        return json.loads(call(self.url, "/readyz").body)

    def wait_idle(self) -> None:
        wait_until(lambda: self.metric("in_flight") == 0, "no request is under way")


@contextlib.contextmanager
def routing(*engines: str, **options: Any) -> Iterator[RunningRouter]:
    """Until the block ends; then it must be gone without a trace."""
    config = RouterConfig(engines=engines, port=0, **{"health_interval_s": 0.1, "stop_deadline_s": 1.0, **options})
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ports: list[int] = []
    made: list[Router] = []

    async def run() -> None:
        made.append(Router(config))
        await made[0].run(lambda port: (ports.append(port), ready.set()))  # type: ignore[func-returns-value]

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(START_DEADLINE_S)
        yield RunningRouter(f"http://127.0.0.1:{ports[0]}")
    finally:
        loop.call_soon_threadsafe(made[0].stop)
        thread.join(START_DEADLINE_S)
        assert not thread.is_alive()
        assert not asyncio.all_tasks(loop)
        loop.close()


def free_port() -> int:
    """Nobody listens there; somebody could."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
