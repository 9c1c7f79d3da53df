"""`kvstore route` on real sockets: answers pass unchanged, failures cost what they must and no more."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from openai_server import OpenAIServer, serving
from routers import ROOT, FakeEngineProcess, call, chat, fake_engines, free_port, routing
from sidecar_process import read_line, wait_until

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair() -> Iterator[list[FakeEngineProcess]]:
    """Two engines that nobody kills."""
    with fake_engines(2) as engines:
        yield engines


def stream(url: str, body: dict[str, Any], **headers: str) -> http.client.HTTPResponse:
    """A request whose answer is being read."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    response.connection = connection  # type: ignore[attr-defined]
    return response


def hang_up(response: http.client.HTTPResponse) -> None:
    response.connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    response.close()
    response.connection.close()  # type: ignore[attr-defined]


def test_answers_pass_unchanged_with_their_heads(pair: list[FakeEngineProcess]) -> None:
    urls = [engine.url for engine in pair]
    with routing(*urls) as router:
        for body in (chat("hello " * 100), chat("hello " * 100, stream=False)):
            for url in urls:
                call(url, CHAT, body)  # now both have it cached, and answer alike
            direct, routed = call(urls[0], CHAT, body), call(router.url, CHAT, body)

            assert routed.body == direct.body
            assert routed.status == direct.status == 200
            assert routed.headers["Content-Type"] == direct.headers["Content-Type"]
            assert routed.headers["x-kvstore-engine"] in urls
        assert json.loads(call(router.url, "/v1/models").body)["data"][0]["id"] == "fake"
        assert call(router.url, "/healthz").body == b"ok\n"
        assert router.ready["ready"]
        assert router.metric("http_responses_total", code="200") >= 3


def test_headers_pass_but_those_between_neighbours() -> None:
    sent = {
        "Authorization": "Bearer key",
        "x-session-id": "s",
        "Connection": "close, x-hop",
        "x-hop": "1",
        "TE": "trailers",
    }
    with serving(OpenAIServer()) as engine, routing(engine.url) as router:
        with contextlib.closing(stream(router.url, chat("hello"), **sent)) as response:
            assert response.read().endswith(b"[DONE]\n\n")
        (got,) = engine.headers

    assert (got["Authorization"], got["x-session-id"]) == ("Bearer key", "s")
    assert got["Host"] == engine.url.removeprefix("http://")
    assert not {"x-hop", "te", "connection"} & {name.lower() for name in got}


def test_a_chat_stays_with_its_engine_and_the_next_one_goes_to_the_other(pair: list[FakeEngineProcess]) -> None:
    with routing(*(engine.url for engine in pair)) as router:
        homes = []
        for name in ("one", "two"):
            text, engines = f"{name} " * 200, set()
            for _ in range(3):
                engines.add(call(router.url, CHAT, chat(text)).headers["x-kvstore-engine"])
                text += "more " * 50
            homes.append(engines)

        assert [len(engines) for engines in homes] == [1, 1]
        assert homes[0] != homes[1]
        assert router.metric("requests_total", reason="prefix") == 4
        assert router.metric("requests_total", reason="new") == 2
        assert router.metric("prompt_bytes_total", cached="yes") > router.metric("prompt_bytes_total", cached="no")


def test_fifty_streams_at_once_are_all_whole_and_spread(pair: list[FakeEngineProcess]) -> None:
    with routing(*(engine.url for engine in pair), policy="prefix", max_lead=4) as router:
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda n: call(router.url, CHAT, chat(f"{n} " * 50, tokens=100)), range(50)))

        assert [(answer.status, len(answer.events), answer.events[-1]) for answer in answers] == [
            (200, 102, b"[DONE]")
        ] * 50
        assert min(Counter(answer.headers["x-kvstore-engine"] for answer in answers).values()) >= 20
        router.wait_idle()


def test_a_client_that_hangs_up_ends_its_request_at_the_engine(pair: list[FakeEngineProcess]) -> None:
    (engine, _), before = pair, pair[0].state["hangups"]
    with routing(engine.url) as router:
        response = stream(router.url, chat("hello", tokens=100_000))
        assert response.read(20)
        hang_up(response)

        wait_until(lambda: engine.state["hangups"] == before + 1, "the engine hears of it")
        router.wait_idle()
        assert router.metric("hangups_total") == 1


def test_a_client_that_hangs_up_before_the_first_byte_ends_its_request_too() -> None:
    with fake_engines(1, prefill_s=10.0) as (engine,), routing(engine.url) as router:
        parts = urlsplit(router.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
        connection.request("POST", CHAT, json.dumps(chat("hello")), {"Content-Type": "application/json"})
        wait_until(lambda: engine.state["running"] == 1, "it runs")
        connection.close()

        wait_until(lambda: engine.state["running"] == 0, "the engine hears of it")
        router.wait_idle()


def test_an_engine_killed_before_the_first_byte_costs_no_request() -> None:
    with (
        fake_engines(1, prefill_s=10.0) as (slow,),
        fake_engines(1) as (quick,),
        routing(slow.url, quick.url, policy="round_robin") as router,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [pool.submit(call, router.url, CHAT, chat(f"{n} " * 50)) for n in range(8)]
        wait_until(lambda: slow.state["running"] == 4, "half of them wait at the slow one")
        slow.kill()
        answers = [future.result() for future in asked]

        assert [(answer.status, answer.events[-1]) for answer in answers] == [(200, b"[DONE]")] * 8
        assert {answer.headers["x-kvstore-engine"] for answer in answers} == {quick.url}
        assert router.metric("retries_total", engine=slow.url) == 4
        wait_until(lambda: not router.ready["engines"][slow.url]["up"], "it is known to be down")
        assert call(router.url, CHAT, chat("hello")).status == 200
        assert router.metric("retries_total", engine=slow.url) == 4  # nobody asked it again


def test_an_engine_killed_in_the_middle_of_a_stream_is_told_as_an_error_and_others_go_on() -> None:
    with (
        fake_engines(2, token_s=0.005) as engines,
        routing(*(engine.url for engine in engines), policy="round_robin") as router,
    ):
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(call, router.url, CHAT, chat("hello", tokens=200)) for _ in range(4)]
            wait_until(lambda: all(engine.state["running"] == 2 for engine in engines), "two streams at each")
            time.sleep(0.1)
            engines[0].kill()
            answers = [future.result() for future in asked]

        by_engine = {
            engine.url: [a for a in answers if a.headers["x-kvstore-engine"] == engine.url] for engine in engines
        }
        for broken in by_engine[engines[0].url]:
            assert "choices" in broken.events[0]
            assert broken.events[-1]["error"]["code"] == "engine_failed"
            assert b"[DONE]" not in broken.body
        assert [len(answer.events) for answer in by_engine[engines[1].url]] == [202, 202]
        assert router.metric("broken_answers_total", engine=engines[0].url) == 2


def test_an_answer_that_breaks_off_elsewhere_is_cut_off() -> None:
    """In the middle of an event, and in an answer of known length, an error event would be read as part of it."""

    async def misbehave(number: int, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream"} if number else {"Content-Type": "application/json"}
        response = web.StreamResponse(headers=headers)
        if not number:
            response.content_length = 1000
        await response.prepare(request)
        await response.write(b'data: {"choi')
        assert request.transport is not None
        request.transport.close()
        return response

    with serving(OpenAIServer(misbehave=misbehave)) as engine, routing(engine.url) as router:
        for _ in range(2):
            with pytest.raises(http.client.IncompleteRead) as caught:
                call(router.url, CHAT, chat("hello"))
            assert caught.value.partial == b'data: {"choi'


def test_with_no_engine_up_clients_are_told_when_to_come_back_and_one_that_starts_is_used() -> None:
    port = free_port()
    with routing(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}") as router:
        refused = call(router.url, CHAT, chat("hello"))
        ready = call(router.url, "/readyz")

        assert (refused.status, refused.headers["Retry-After"], refused.error["code"]) == (503, "1", "no_engine")
        assert "Connection refused" in refused.error["message"] or "Connect call failed" in refused.error["message"]
        assert ready.status == 503
        assert call(router.url, "/healthz").status == 200

        engine = FakeEngineProcess(port=port)
        try:
            engine.wait_ready()
            wait_until(lambda: router.ready["ready"], "the engine is found")
            assert call(router.url, CHAT, chat("hello")).status == 200
        finally:
            engine.kill()
        refused = call(router.url, CHAT, chat("hello"))  # it is not known yet, or it is: both are told alike
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")


def test_a_full_engine_passes_requests_to_the_next_and_full_ones_are_believed() -> None:
    full = [True, False]

    def refusing(which: int) -> Any:
        async def misbehave(number: int, request: web.Request, body: dict[str, Any]) -> web.Response | None:
            if not full[which]:
                return None
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "7"})

        return misbehave

    servers = [OpenAIServer(misbehave=refusing(which)) for which in range(2)]
    with serving(servers[0]) as one, serving(servers[1]) as other, routing(one.url, other.url) as router:
        answers = [call(router.url, CHAT, chat("hello")) for _ in range(4)]
        full[1] = True
        refused = call(router.url, CHAT, chat("hello"))

    assert {(answer.status, answer.headers["x-kvstore-engine"]) for answer in answers} == {(200, other.url)}
    assert (refused.status, refused.headers["Retry-After"], refused.error["message"]) == (429, "7", "full")


def test_an_engine_that_is_silent_is_told_as_a_timeout_and_not_asked_again() -> None:
    with (
        fake_engines(2, prefill_s=30.0) as engines,
        routing(*(engine.url for engine in engines), silence_s=0.3) as router,
    ):
        answer = call(router.url, CHAT, chat("hello"))

        assert (answer.status, answer.error["code"]) == (504, "engine_failed")
        assert sum(engine.state["requests"] for engine in engines) == 1


class Health(OpenAIServer):
    """Its health path answers what it is told to."""

    status = 200

    async def models(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)


def test_an_engine_is_down_after_three_checks_that_failed_and_one_that_wants_a_key_is_up() -> None:
    server = Health()
    server.status = 401
    with serving(server) as engine, routing(engine.url, health_interval_s=0.05) as router:
        assert router.ready["engines"][engine.url]["up"]
        server.status = 500
        wait_until(lambda: not router.ready["ready"], "it is down")
        refused = call(router.url, CHAT, chat("hello"))
        server.status = 200
        wait_until(lambda: router.ready["ready"], "it is up again")
        assert call(router.url, CHAT, chat("hello")).status == 200

    assert refused.status == 503
    assert "/v1/models answered 500" in refused.error["message"]
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v2/anything", None, {}, 404),
        ("/v1/", None, {}, 404),
        (CHAT, b"x=1", {"Content-Type": "text/plain"}, 415),
        (CHAT, b"x" * 5000, {}, 413),
        (CHAT, b"{", {}, 500),  # the engine's own opinion
    ],
)
def test_what_cannot_be_routed_is_answered_at_once(
    pair: list[FakeEngineProcess], path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    with routing(pair[0].url, max_body_bytes=4096) as router:
        assert call(router.url, path, body, **headers).status == status
        router.wait_idle()


# --- the command ----------------------------------------------------------------------------------------------------


def run_route(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", "route", "--listen", "127.0.0.1:0", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_the_command_serves_and_lets_streams_end_when_it_is_told_to_stop(pair: list[FakeEngineProcess]) -> None:
    child = run_route("--engine", pair[0].url, "--engine", pair[1].url + "/v1", "--policy", "least_loaded")
    try:
        line = read_line(child, 20)
        assert line.startswith("kvstore route ready url=http://127.0.0.1:")
        url = line.rpartition("url=")[2].removesuffix("/v1")
        response = stream(url, chat("hello", tokens=500))
        assert response.read(10)
        child.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=5)
        assert response.read().endswith(b"data: [DONE]\n\n")
        response.connection.close()  # type: ignore[attr-defined]
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.communicate(timeout=10)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "engine"),
        (("--engine", "localhost:8000"), "engine"),
        (("--engine", "http://a:1", "--engine", "http://a:1/v1"), "engine"),
        (("--engine", "http://a:1", "--listen", "8080"), "listen"),
        (("--engine", "http://a:1", "--prefix-bytes", "lots"), "prefix-bytes"),
        (("--engine", "http://a:1", "--health-path", "health"), "health-path"),
    ],
)
def test_the_command_names_what_is_wrong(options: tuple[str, ...], named: str) -> None:
    from click.testing import CliRunner

    from kvstore.cli.main import cli
    from kvstore.core.errors import ConfigError

    result = CliRunner().invoke(cli, ["route", *options])

    assert isinstance(result.exception, ConfigError)
    assert result.exception.fields["field"] == named
    assert "; use " in result.exception.message or "twice" in result.exception.message


def test_an_address_that_is_taken_is_refused_and_leaves_nothing_running(pair: list[FakeEngineProcess]) -> None:
    import asyncio

    from kvstore.core.errors import ConfigError
    from kvstore.route.server import Router, RouterConfig

    num_threads = threading.active_count()  # other tests of this process left theirs

    async def run(port: int) -> None:
        await Router(RouterConfig(engines=(pair[0].url,), port=port)).run(lambda _: None)

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        asyncio.run(run(taken.getsockname()[1]))
    assert threading.active_count() <= num_threads
