"""The server in this process, where a test can shorten its deadlines and break its engine."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server_process import BLOCK, MODEL, NUM_PAGES
from click.testing import CliRunner
from fake_connector import FakeConnector, FakeStore, Temper
from sidecar_process import ROOT, wait_until
from tiny_llama import random_tensors, write_gguf

from kvstore.cli.engine import engine as engine_command
from kvstore.core.errors import ConfigError, PeerUnavailable
from kvstore.engine_connector.engine.api_server import bodies, prompts
from kvstore.engine_connector.engine.api_server.connections import ConnectionLimits
from kvstore.engine_connector.engine.api_server.server import ApiServer, ServerConfig
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.outputs import TokenDelta
from kvstore.engine_connector.engine.sampler import SamplingParams

pytestmark = pytest.mark.e2e

DEADLINE_S = 20.0
SIZES: dict[str, Any] = {"num_pages": NUM_PAGES, "block_tokens": BLOCK, "chunk_tokens": 32, "num_threads": 1}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "the 12", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("limits") / "tiny.gguf", random_tensors())


class BrittleLLM(LLM):
    """Steps until it is told to break."""

    broken = False

    def step(self) -> list[TokenDelta]:
        if self.broken:
            raise RuntimeError("no memory")
        return super().step()


class Served:
    """A server on a thread of its own."""

    def __init__(self, model: Path, connector: FakeConnector | None = None, **config: Any) -> None:
        self.error: BaseException | None = None
        self._model, self._config = model, ServerConfig(model_name=MODEL, port=0, **config)
        self._factory = connector.factory if connector else None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def num_unsent(self) -> int:
        """Bytes that the server keeps for its clients."""
        transports = [each._transport for each in list(self._server._connections._open.values())]
        return sum(transport.get_write_buffer_size() for transport in transports if transport)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (RuntimeError, PeerUnavailable) as err:
            self.error = err

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = ApiServer(self._config, self._open)
        await self._server.run(self._on_ready)

    def _open(self) -> LLM:
        self.llm = BrittleLLM(self._model, connector_factory=self._factory, **SIZES)
        return self.llm

    def _on_ready(self, port: int) -> None:
        self.port = port
        self._ready.set()


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., Served]]:
    """Servers with the given config, ended in order and without an error."""
    with contextlib.ExitStack() as servers:

        def start(**config: Any) -> Served:
            served = Served(model, **config)
            servers.callback(served.stop)
            return served

        yield start


def post(body: dict[str, Any] | bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + data


def read_to_the_end(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := client.recv(1 << 16):
            data += more
    return data


# --- connections --------------------------------------------------------------------------------------------------------


def test_a_connection_without_a_request_is_ended(serve: Callable[..., Served]) -> None:
    served = serve(connections=ConnectionLimits(head_deadline_s=0.3))

    with served.connect() as silent, served.connect() as slow, served.connect() as good:
        slow.sendall(b"POST /v1/comp")
        good.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert good.recv(4096).startswith(b"HTTP/1.1 200")
        assert read_to_the_end(silent) == b""
        assert read_to_the_end(slow) == b""
        good.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert good.recv(4096).startswith(b"HTTP/1.1 200"), "one that has asked may pause"


def test_more_connections_than_allowed_are_ended(serve: Callable[..., Served]) -> None:
    served = serve(connections=ConnectionLimits(max_connections=3))

    with contextlib.ExitStack() as sockets:
        first = [sockets.enter_context(served.connect()) for _ in range(3)]
        for client in first:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        assert read_to_the_end(sockets.enter_context(served.connect())) == b""
        first.pop().close()

        def has_room() -> bool:
            with served.connect() as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return read_to_the_end(client).startswith(b"HTTP/1.1 200")

        wait_until(has_room, "room for one")


def test_answers_that_nobody_reads_end_the_connection(serve: Callable[..., Served]) -> None:
    """Requests in a row whose answers are left lying: the server holds little, and not for long."""
    served = serve(connections=ConnectionLimits(unread_deadline_s=0.5, max_unsent_bytes=4096))

    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(DEADLINE_S)
        client.connect(("127.0.0.1", served.port))
        asking = threading.Thread(target=ask_until_cut_off, args=(client,))
        asking.start()
        most = 0
        while asking.is_alive():
            most = max(most, served.num_unsent())
        asking.join()

    assert 0 < most < 60_000, "two limits and an answer"


def ask_until_cut_off(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while True:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)


def test_a_body_that_does_not_come_is_not_waited_for(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies.Bodies.__init__, "__defaults__", (0.3,))
    served = serve()

    with served.connect() as client:
        client.sendall(post(BODY)[:-10])
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_bodies_under_way_are_bounded(serve: Callable[..., Served]) -> None:
    served = serve(max_body_bytes=1000)
    filler = post(b"x" * 1000)[:-900]

    with contextlib.ExitStack() as sockets:
        for _ in range(bodies.MAX_BODIES):
            sockets.enter_context(served.connect()).sendall(filler)
        client = sockets.enter_context(served.connect())

        def is_refused() -> bool:
            client.sendall(post(b"{}"))
            return client.recv(4096).startswith(b"HTTP/1.1 429 ")

        wait_until(is_refused, "full of bodies")


def test_prompts_under_way_are_bounded(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_TOKENIZING", 0)
    served = serve()

    with served.connect() as client:
        client.sendall(post(BODY))
        assert client.recv(4096).startswith(b"HTTP/1.1 429 ")
        client.sendall(post(BODY | {"prompt": [5]}))
        assert client.recv(4096).startswith(b"HTTP/1.1 200 "), "token ids need no tokenizer"


# --- deadlines and the engine's end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_has_a_deadline(serve: Callable[..., Served], stream: bool) -> None:
    served = serve(request_deadline_s=0.3)

    with served.connect() as client:
        client.sendall(post(BODY | {"stream": stream, "n": 8}, "Connection: close"))
        answer = read_to_the_end(client)

    assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 504 ")
    assert b'"code":"deadline"' in answer
    assert b"[DONE]" not in answer
    wait_until(lambda: served.llm.stats().num_free_pages == NUM_PAGES, "aborted")


def test_a_load_that_fails_is_recomputed_or_told(model: Path, serve: Callable[..., Served]) -> None:
    prompt = [5 + i % 200 for i in range(40)]
    store = FakeStore()
    with LLM(model, connector_factory=FakeConnector(store).factory, **SIZES) as writer:
        writer.generate([prompt], SamplingParams(max_tokens=1))
    body = BODY | {"prompt": prompt, "max_tokens": 3}

    for stream, fails in ((False, True), (True, True), (True, False), (False, False)):
        served = serve(connector=FakeConnector(store, Temper(block_fails=1.0)))
        policy = {"load_failure": "fail" if fails else "recompute"}
        with served.connect() as client:
            client.sendall(post(body | {"stream": stream, "kvstore": policy}, "Connection: close"))
            answer = read_to_the_end(client)
        assert answer.startswith(b"HTTP/1.1 503 " if fails and not stream else b"HTTP/1.1 200 ")
        assert (b'"code":"load_failed"' in answer) == fails
        assert (b'"finish_reason":"length"' in answer) != fails


def test_an_engine_that_breaks_ends_the_server_and_says_so(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Streams get an error, and who started the server gets the exception: something has to start it again."""
    served = Served(model)
    with served.connect() as stream, caplog.at_level(logging.CRITICAL):
        stream.sendall(post(BODY))
        seen = b""
        while b"data: " not in seen:
            seen += stream.recv(4096)
        served.llm.broken = True
        rest = read_to_the_end(stream)

    assert b"engine: broke (RuntimeError)" in rest
    assert b"[DONE]" not in rest
    served.stop()
    assert isinstance(served.error, RuntimeError)


def test_a_request_that_comes_while_the_server_stops_is_refused(model: Path) -> None:
    served = Served(model)
    with served.connect() as client, served.connect() as late:
        for each in (client, late):
            each.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert each.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(post(BODY | {"stream": False}))
        wait_until(lambda: served.llm.stats().num_running == 1, "it runs")
        served.stop()
        assert client.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert read_to_the_end(late) == b""
    assert served.error is None


# --- the command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["/nowhere.gguf"], "nowhere.gguf"),
        (["MODEL", "--socket", "s"], "--no-store"),
        (["MODEL", "--chunk-tokens", "30"], "chunk_tokens: 30"),
        (["MODEL", "--kv-dtype", "int3"], "kv_dtype: 'int3'"),
        (["MODEL", "--hand-over", "producer"], "hand-over: producer and no store; leave out --hand-over or --no-store"),
        (["MODEL", "--device", "gpu"], "device: 'gpu': use one of cpu, cuda"),
        (["MODEL", "--device", "cuda", "--kv-dtype", "float32"], "device: 'cuda': "),  # no GPU, or pages of 16 bits
        (["MODEL", "--host", "256.1.1.1"], "256.1.1.1"),
        (["MODEL", "--port", "TAKEN"], "host, port: cannot listen"),
    ],
)
def test_what_cannot_be_served_is_refused(model: Path, flags: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"MODEL": str(model), "TAKEN": str(taken.getsockname()[1])}
        result = CliRunner().invoke(engine_command, ["serve", *(names.get(flag, flag) for flag in flags), "--no-store"])

    assert isinstance(result.exception, ConfigError)
    assert message in result.exception.message


def test_sigterm_while_the_model_is_loaded(model: Path) -> None:
    code = "import sys, time, kvstore.cli.main as main, kvstore.engine_connector.engine.llm as llm;"
    code += "llm.load_model = lambda path: (print('loading', flush=True), time.sleep(60));"
    code += f"sys.argv = ['kvstore', 'engine', 'serve', {str(model)!r}, '--no-store', '--stop-deadline-s', '1'];"
    code += "main.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"loading\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 2
        assert b"error: engine: not closed within 1 s" in child.stderr.read()
