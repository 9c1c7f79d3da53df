"""Clients that hang up in mid-stream, and malformed requests by the thousand: the server answers the next request, and no
page and no lease is lost.

API_FUZZ_ROUNDS and API_FUZZ_SEED choose how many and which; `make soak` sends 10,000.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from api_server_process import ANSWER_DEADLINE_S, MODEL, ApiServerProcess, running_api_server
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until
from tiny_llama import random_tensors, write_gguf

ROUNDS = int(os.environ.get("API_FUZZ_ROUNDS", "2000"))
SEED = int(os.environ.get("API_FUZZ_SEED", "0")) or random.randrange(1, 1 << 32)
NUM_THREADS = 6
HALF_A_REQUEST_S = 0.2  # no answer by then: the server waits for the rest
WAVES, CLIENTS = 5, 40  # a wave fits into batch and queue

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120 + ROUNDS * 0.1)]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("abuse")) as process:
        yield process


@pytest.fixture(scope="module")
def server(sidecar: SidecarProcess) -> Iterator[ApiServerProcess]:
    model = write_gguf(sidecar.socket.with_name("tiny.gguf"), random_tensors())
    flags = ("--socket", str(sidecar.socket), "--max-body-bytes", "65536", "--hand-over", "both")
    with running_api_server(model, "abused", *flags) as process:
        yield process


@pytest.fixture(autouse=True)
def _nothing_is_lost(server: ApiServerProcess, sidecar: SidecarProcess) -> Iterator[None]:
    """After every test here; the engine's own check() runs when the server ends, whose status tells."""
    yield
    assert server.alive(), server.log
    server.wait_until_idle()
    with tool(sidecar) as watcher:
        wait_until(lambda: watcher.stats().num_leases == 0, "no lease")
    assert ask(server, {"model": MODEL, "prompt": "the", "max_tokens": 1})[0] == 200


def ask(server: ApiServerProcess, body: dict[str, Any]) -> tuple[int, bytes]:
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_DEADLINE_S)
    ) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def connect(server: ApiServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_DEADLINE_S)


def request_bytes(body: bytes, *, path: str = "/v1/completions", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


# --- hang-ups -----------------------------------------------------------------------------------------------------------


def test_two_hundred_clients_hang_up_in_mid_stream(server: ApiServerProcess) -> None:
    """Some while they wait, some after the first tokens, some with a reset; with n samples too."""
    rng = random.Random(SEED)
    before = server.figures()

    for _ in range(WAVES):
        with contextlib.ExitStack() as sockets:
            clients = [sockets.enter_context(connect(server)) for _ in range(CLIENTS)]
            for number, client in enumerate(clients):
                body = {"model": MODEL, "prompt": [rng.randrange(3, 250) for _ in range(rng.randrange(1, 90))]}
                body |= {"stream": True, "max_tokens": 900, "ignore_eos": True, "n": rng.choice((1, 1, 1, 3))}
                client.sendall(request_bytes(json.dumps(body).encode()))
                assert read_past(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200 "), f"seed {SEED}"
                if number % 2:  # reset instead of an orderly end
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for client in clients[: rng.randrange(4)]:  # the first ones run
                assert b"data: " in read_past(client, b"data: ")

    server.wait_until_idle()
    after = server.figures()
    assert after["kvstore_engine_hangups_total"] - before["kvstore_engine_hangups_total"] == WAVES * CLIENTS
    assert after["kvstore_engine_output_tokens_total"] == before["kvstore_engine_output_tokens_total"]


def test_clients_hang_up_before_they_are_answered(server: ApiServerProcess) -> None:
    """In the middle of a body, and while a whole answer is computed."""
    whole = request_bytes(json.dumps({"model": MODEL, "prompt": "the", "max_tokens": 900, "ignore_eos": True}).encode())
    before = server.figures()["kvstore_engine_hangups_total"]
    for number in range(40):
        with connect(server) as client:
            client.sendall(whole[: -(number % 3 * 20) or None])

    wait_until(lambda: server.figures()["kvstore_engine_hangups_total"] >= before + 14, "the whole ones hung up")


def read_past(client: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = client.recv(4096)
        assert more, data
        data += more
    return data


# --- malformed requests -------------------------------------------------------------------------------------------------

COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": "the 12",
    "max_tokens": 2,
    "temperature": 0.5,
    "seed": 1,
    "n": 1,
}
COMPLETION |= {"stream": False, "stop": ["x"], "logprobs": 1, "kvstore": {"salt": "a", "priority": 1, "ttl_s": 5.0}}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_p": 0.5}
CHAT |= {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
CHAT |= {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, "first_token_ids": [5]}}
COMPLETION |= {"kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": True, "remote_host": None}}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e308, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**40, 10**400),
    *("", "a", "\x00", "é", "\U0001f600", "<|im_end|>", "a" * 3000, " " * 500, "null", "nan", "../..", "%s%n"),
    *([], [[]], [None], [1, "a"], [[1], "a"], ["a"] * 200, [7] * 1500, [-5], {}, {"": ""}, {"a": {"b": []}}),
)
NAMES = ("", "a", "model", "messages", "prompt", "stream", "echo", "kvstore", "salt", "tools", "\x00", "n" * 5000, "é")


def odd_value(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        value: Any = rng.choice(ODD)
        for _ in range(rng.choice((3, 50, 500))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return rng.choice(ODD)


def mutate(value: Any, rng: random.Random) -> Any:
    """`value` with one thing changed, anywhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        match rng.randrange(5):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return value | {rng.choice(NAMES): odd_value(rng)}
            case _:
                return value | {name: mutate(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(value[at], rng), *value[at + rng.randrange(2) :]]
    return odd_value(rng)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, pieces cut out, doubled, or replaced by noise."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 1, 4, 40))
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + size]
            case 2:
                out[at:at] = rng.randbytes(size)
            case 3:
                out[at:at] = out[at : at + size]
            case _:
                out[at:] = b""
    return bytes(out)


class Abuser:
    """One thread's share; what it met is counted by status, and what should not be is kept."""

    def __init__(self, server: ApiServerProcess, number: int, rounds: int) -> None:
        self.met: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server, self._rounds = server, rounds
        self._rng = random.Random(f"{SEED}-{number}")
        self._connection: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60 + ROUNDS * 0.1)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        for number in range(self._rounds):
            kind = self._rng.choices((self._odd_json, self._odd_bytes, self._odd_http), (70, 15, 15))[0]
            try:
                kind()
            except (OSError, http.client.HTTPException, AssertionError, ValueError) as err:
                self.wrong.append(f"seed {SEED} round {number} {kind.__name__}: {err!r}")
                self._hang_up()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _odd_json(self) -> None:
        path, body = self._rng.choice((("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)))
        for _ in range(self._rng.choice((1, 1, 2, 4))):
            body = mutate(body, self._rng)
        self._post(path, json.dumps(body).encode())

    def _odd_bytes(self) -> None:
        path, body = self._rng.choice((("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)))
        self._post(path, mutate_bytes(json.dumps(body).encode(), self._rng))

    def _post(self, path: str, body: bytes) -> None:
        """A well-formed HTTP request gets an answer: never a 5xx, and an error says what is wrong."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=ANSWER_DEADLINE_S)
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        if response.will_close:
            self._hang_up()
        self.met[str(response.status)] += 1
        assert response.status in {200, 400, 404, 413, 429}, (response.status, answer[:200], body[:300])
        if response.status != 200:
            assert json.loads(answer)["error"]["message"], (answer, body[:300])
        elif b"data: " in answer:
            assert answer.endswith(b"data: [DONE]\n\n"), (answer[-300:], body[:300])

    def _odd_http(self) -> None:
        """Broken HTTP: an answer that is a refusal, or the end of the connection; half a request may get none."""
        rng, body = self._rng, json.dumps(COMPLETION).encode()
        whole = request_bytes(body)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        stream = rng.choice(
            (
                rng.randbytes(rng.randrange(1, 400)),
                mutate_bytes(whole, rng),
                whole[: rng.randrange(1, len(whole))],
                request_bytes(body, length=len(body) + rng.randrange(1, 50)),
                request_bytes(body, length=1 << 60),
                request_bytes(body, length=-1),
                head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + body,
                head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc\r\nzz\r\n",
                head + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc",
                head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + body,
                head + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
                head + b"X: a\r\n" * 500 + b"\r\n",
                b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
                b"GET /v1/models HTTP/9.9\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(60),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                head.replace(b"Host: x", b"Upgrade: websocket\r\nConnection: upgrade") + b"\r\n" + body,
                head + b"Expect: the-unexpected\r\nContent-Length: 2\r\n\r\n{}",
                whole * rng.randrange(2, 5),
            )
        )
        with connect(self._server) as client:
            answer = b""
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
                client.sendall(stream)
                if rng.random() < 0.7:  # else gone before an answer
                    client.settimeout(HALF_A_REQUEST_S)
                    answer = client.recv(1 << 16)
        self.met["raw " + (answer[9:12].decode(errors="replace") if answer else "none")] += 1
        assert not answer or answer.startswith(b"HTTP/"), answer[:100]
        assert answer[9:10] in {b"", b"1", b"2", b"4"}, (answer[:300], stream[:300])


def test_malformed_requests_are_refused_and_forgotten(server: ApiServerProcess) -> None:
    abusers = [Abuser(server, number, ROUNDS // NUM_THREADS + 1) for number in range(NUM_THREADS)]
    for abuser in abusers:
        abuser.join()

    wrong = [line for abuser in abusers for line in abuser.wrong]
    met = sum((abuser.met for abuser in abusers), Counter())
    print(f"seed {SEED}: {sum(met.values())} requests, {dict(met.most_common())}")
    assert wrong == []
    assert met["400"] > ROUNDS * 0.2
    assert met["200"] > ROUNDS * 0.02
    assert met["raw 400"] > ROUNDS * 0.02
    assert sum(met.values()) >= ROUNDS


def test_half_a_request_and_a_flood_of_connections(server: ApiServerProcess) -> None:
    """Two hundred connections that say nothing do not keep others out, and go when their owner does."""
    with contextlib.ExitStack() as sockets:
        for _ in range(200):
            sockets.enter_context(connect(server)).sendall(b"POST /v1/completions HTT")
        assert ask(server, {"model": MODEL, "prompt": "the", "max_tokens": 1})[0] == 200
        assert server.figures()["kvstore_engine_connections"] >= 200

    wait_until(lambda: server.figures()["kvstore_engine_connections"] < 10, "connections gone")
