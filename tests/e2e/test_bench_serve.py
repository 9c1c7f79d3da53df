"""`kvstore bench serve` against a real server on a real socket: good, slow, broken, full, absent."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai_server import OpenAIServer, chunk, serving, start_stream

from kvstore.bench import arrivals
from kvstore.bench.incident import Incident
from kvstore.bench.plan import Plan, Result, Target, run_plan
from kvstore.bench.report import as_json, find_problems, find_warnings
from kvstore.bench.workload import Lengths, Span, multi_turn, random_prompts, shared_system
from kvstore.cli.main import main
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import ConfigError, PeerUnavailable

pytestmark = pytest.mark.e2e

LENGTHS = Lengths(Span(8, 40), Span(6, 6))
COMMAND_DEADLINE_S = 60


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving(OpenAIServer()) as started:
        yield started


def run(*servers: OpenAIServer, **changes: Any) -> Result:
    """Eight prompts in a closed loop of two, unless `changes` say otherwise."""
    targets = tuple(Target("AB"[number], f"{one.url}/v1", {}) for number, one in enumerate(servers))
    fields: dict[str, Any] = {
        "workload": random_prompts(1, requests=8, lengths=LENGTHS),
        "arrivals": arrivals.closed(2),
        "targets": targets,
        "api": "chat",
        "deadline_s": 10.0,
        "warmup": 0,
    }
    return asyncio.run(run_plan(Plan(**fields | changes), MonotonicClock(), lambda _target, _sample: None))


def kinds(result: Result) -> list[str]:
    """Of each request of the first side, in order: "ok" or the failure."""
    samples = sorted(result.sides[0].samples, key=lambda s: (s.conversation, s.turn))
    return [s.exchange.failure.kind if s.exchange.failure else "ok" for s in samples]


def test_a_run_reports_what_the_server_said_and_when(server: OpenAIServer) -> None:
    server.token_s = 0.01
    result = run(server, slo={"ttft": 5.0, "tpot": 0.001})
    (side,) = result.sides
    summary = side.summary

    assert (summary.requests, summary.succeeded, summary.output_tokens) == (8, 8, 48)
    assert (
        summary.prompt_tokens == summary.asked_prompt_tokens == sum(len(OpenAIServer.words(b)) for b in server.bodies)
    )
    assert (summary.good, summary.without_usage, side.model) == (0, 0, "tiny")
    for sample in side.samples:
        assert len(sample.itl_s) == 5
        assert sample.ttft_s is not None
        assert 0.009 < sample.ttft_s < sample.e2e_s
        assert sample.e2e_s >= 0.06
        assert sample.exchange.text.count(" ") == 6
    assert all(spread and spread.mean > 0.009 for spread in summary.latencies.values())


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_same_seed_asks_and_hears_the_same(api: str) -> None:
    with serving(OpenAIServer()) as one, serving(OpenAIServer()) as other:
        first, second = run(one, api=api), run(other, api=api)

    assert sorted(map(repr, one.bodies)) == sorted(map(repr, other.bodies))
    assert first.sides[0].summary.output_hash == second.sides[0].summary.output_hash


def test_a_chat_sends_its_answers_back_and_hits_what_the_server_kept(server: OpenAIServer) -> None:
    workload = multi_turn(1, conversations=2, turns=3, lengths=LENGTHS, system_tokens=16, think_s=0.0)
    result = run(server, workload=workload, arrivals=arrivals.closed(1))

    for number in (1, 2):
        before, after = server.bodies[number - 1]["messages"], server.bodies[number]["messages"]
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": result.sides[0].samples[number - 1].exchange.text}
    cached = [sample.cached_tokens for sample in result.sides[0].samples]
    assert cached[0] == 0
    assert cached[3] == 16  # the second chat finds the system prompt
    assert 0 < cached[1] < cached[2]


def test_all_cold_hits_nothing_even_in_a_second_run(server: OpenAIServer) -> None:
    workload = shared_system(1, requests=6, lengths=LENGTHS, system_tokens=32)
    changes: dict[str, Any] = {"workload": workload, "arrivals": arrivals.closed(1), "cold_by": "auto"}

    for owner, way in (("kvstore", "kvstore"), ("vllm", "cache_salt"), ("somebody", "prefix")):
        server.owned_by = owner
        for nonce in ("n1", "n2"):
            (side,) = run(server, nonce=f"{owner}-{nonce}", **changes).sides
            assert (side.cold_by, side.summary.cached_tokens) == (way, 0)

    warm = run(server, workload=workload, arrivals=arrivals.closed(1))
    assert warm.sides[0].summary.cached_tokens == 5 * 32


def test_two_servers_are_asked_the_same_and_their_outputs_are_equal() -> None:
    with serving(OpenAIServer(token_s=0.005)) as fast, serving(OpenAIServer(token_s=0.02)) as slow:
        result = run(fast, slow, rounds=4)

    assert result.comparison is not None
    assert result.comparison.same_outputs
    assert (result.comparison.compared, result.comparison.unmatched) == (8, 0)
    assert result.sides[0].summary.output_hash == result.sides[1].summary.output_hash
    assert result.comparison.ratios["tpot_s p50"] > 1.5
    assert find_problems(result) == []


@pytest.mark.parametrize(
    ("sidecars", "changes", "warns"),
    [
        (("a", "a"), {}, True),
        (("a", "b"), {}, False),
        ((None, None), {}, False),
        (("a", "a"), {"scenario": "all-cold", "cold_by": "prefix", "nonce": "n"}, False),
    ],
)
def test_two_engines_on_one_sidecar_are_warned_about(
    sidecars: tuple[str | None, str | None], changes: dict[str, Any], warns: bool
) -> None:
    with serving(OpenAIServer(sidecar=sidecars[0])) as one, serving(OpenAIServer(sidecar=sidecars[1])) as other:
        result = run(one, other, **changes)

    assert [warning.split(":")[0] for warning in find_warnings(result)] == ["A and B use one sidecar"] * warns
    assert as_json(result)["warnings"] == find_warnings(result)


def test_rounds_take_turns_and_change_who_is_first() -> None:
    with serving(OpenAIServer()) as one, serving(OpenAIServer()) as other:
        run(one, other, rounds=4)
        marks = sorted([(at, "A") for at in one.sent_at] + [(at, "B") for at in other.sent_at])

    assert "".join(mark for _, mark in marks) == "AABBBBAAAABBBBAA"


def test_a_different_output_is_named_with_the_first_request() -> None:
    with serving(OpenAIServer()) as one, serving(OpenAIServer(twist="x")) as other:
        result = run(one, other)

    (problem,) = find_problems(result)
    assert "outputs differ in 8 of 8 requests, first in request 0.0 at character" in problem


def test_poisson_arrivals_are_sent_when_they_are_due_whatever_the_server_does(server: OpenAIServer) -> None:
    server.token_s = 0.1
    planned = arrivals.poisson(1, 8, 40.0)
    (side,) = run(server, arrivals=planned).sides

    assert tuple(sorted(s.due_s for s in side.samples if s.due_s is not None)) == planned.offsets_s
    assert all(s.lag_s is not None and s.lag_s >= 0 for s in side.samples)
    assert side.summary.duration_s < 8 * 0.6  # side by side


def test_a_full_server_is_counted_and_not_asked_again(server: OpenAIServer) -> None:
    async def refuse(number: int, _: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
        error = {"error": {"message": "the queue is full"}}
        return web.json_response(error, status=429, headers={"Retry-After": "3"}) if number % 2 else None

    server.misbehave = refuse
    result = run(server, arrivals=arrivals.closed(1))
    summary = result.sides[0].summary

    assert kinds(result) == ["ok", "refused"] * 4
    assert len(server.bodies) == 8
    assert summary.failure_examples == {"refused": "429: the queue is full"}
    assert summary.retry_after_s is not None
    assert summary.retry_after_s.max == 3.0


@pytest.mark.parametrize("retry_after", ["soon", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "²"])
def test_a_retry_after_that_is_no_number_of_seconds_is_none(server: OpenAIServer, retry_after: str) -> None:
    async def refuse(*_: object) -> web.StreamResponse | None:
        return web.Response(status=429, headers={"Retry-After": retry_after})

    server.misbehave = refuse

    assert run(server).sides[0].summary.retry_after_s is None


async def _slow(_: int, request: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
    response = await start_stream(request)
    await response.write(chunk(chat=True, text=" word"))
    await asyncio.sleep(30)
    return response


async def _cut(_: int, request: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
    response = await start_stream(request)
    await response.write(chunk(chat=True, text=" word"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def _unfinished(_: int, request: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
    response = await start_stream(request)
    await response.write(chunk(chat=True, text=" word", choice={"finish_reason": "stop"}))
    return response


async def _malformed(_: int, request: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
    response = await start_stream(request)
    await response.write(b"data: {not json\n\ndata: [DONE]\n\n")
    return response


async def _no_stream(*_: object) -> web.StreamResponse | None:
    return web.json_response({"choices": []})


async def _error_in_stream(_: int, request: web.Request, __: dict[str, Any]) -> web.StreamResponse | None:
    response = await start_stream(request)
    await response.write(b'data: {"error": {"message": "page fault"}}\n\n')
    return response


async def _internal(*_: object) -> web.StreamResponse | None:
    return web.Response(status=500, text="oops")


async def _redirect(*_: object) -> web.StreamResponse | None:
    return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"})


@pytest.mark.parametrize(
    ("misbehave", "kind", "message"),
    [
        (_slow, "deadline", "no end within 0.5 s; 1 chunks"),
        (_cut, "broken", "1 chunks with text had come"),
        (_unfinished, "broken", "without data: [DONE]"),
        (_malformed, "malformed", "not JSON: {not json"),
        (_no_stream, "malformed", "application/json"),
        (_error_in_stream, "server", "page fault"),
        (_internal, "http_500", "500: oops"),
        (_redirect, "http_307", "307"),
    ],
)
def test_one_bad_answer_is_an_error_of_its_request_alone(
    server: OpenAIServer, misbehave: Any, kind: str, message: str
) -> None:
    async def third(number: int, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        return await misbehave(number, request, body) if number == 2 else None

    server.misbehave = third
    result = run(server, arrivals=arrivals.closed(1), deadline_s=0.5)

    assert kinds(result) == ["ok", "ok", kind, "ok", "ok", "ok", "ok", "ok"]
    assert message in result.sides[0].summary.failure_examples[kind]
    assert find_problems(result) == []


def test_a_chat_whose_turn_failed_is_not_continued(server: OpenAIServer) -> None:
    async def second(number: int, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        return await _internal() if number == 1 else None

    server.misbehave = second
    workload = multi_turn(1, conversations=2, turns=3, lengths=LENGTHS, system_tokens=0, think_s=0.0)
    result = run(server, workload=workload, arrivals=arrivals.closed(1))

    assert kinds(result) == ["ok", "http_500", "skipped", "ok", "ok", "ok"]
    assert len(server.bodies) == 5


def test_answers_without_usage_are_counted_by_chunks(server: OpenAIServer) -> None:
    server.with_usage = False
    summary = run(server).sides[0].summary

    assert (summary.without_usage, summary.output_tokens, summary.cached_tokens) == (8, 48, None)


def test_a_server_that_dies_in_mid_run_is_seen_before_and_after(server: OpenAIServer, tmp_path: Path) -> None:
    """The command leaves a mark; from then on the server fails."""
    mark = tmp_path / "killed"

    async def fail_when_killed(*_: object) -> web.StreamResponse | None:
        return await _internal() if mark.exists() else None

    server.misbehave, server.token_s = fail_when_killed, 0.005
    command = f"""sh -c 'echo "$KVSTORE_BENCH_LABEL $KVSTORE_BENCH_URL" > {mark}; echo done'"""
    result = run(
        server,
        workload=random_prompts(1, requests=400, lengths=LENGTHS),
        arrivals=arrivals.poisson(1, 400, 200.0),
        incident=Incident(0.5, command),
    )
    (side,) = result.sides

    assert side.incident is not None
    assert (side.incident.exit_code, side.incident.output) == (0, "done")
    assert mark.read_text() == f"A {server.url}/v1\n"
    groups = as_json(result)["sides"][0]["incident"]
    assert groups["before"]["failed"] == 0 < groups["before"]["requests"]
    assert groups["after"]["failed"] > groups["after"]["requests"] / 2
    assert sum(groups[name]["requests"] for name in ("before", "during", "after")) == 400
    assert groups["before"]["latencies"]["ttft_s"]["p99"] > 0
    assert find_problems(result) == []


@pytest.mark.parametrize(
    ("at_s", "command", "problem"),
    [
        (60.0, "true", "was over after"),
        (0.0, "false", "the command failed (1)"),
        (0.0, "no-such-command-here", "cannot be started"),
    ],
)
def test_a_command_that_did_not_do_its_work_is_a_problem(
    server: OpenAIServer, at_s: float, command: str, problem: str
) -> None:
    server.token_s = 0.02
    started_s = time.monotonic()

    (found,) = find_problems(run(server, incident=Incident(at_s, command)))

    assert problem in found
    assert time.monotonic() - started_s < 30


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    absent = OpenAIServer(url="http://127.0.0.1:9")

    with pytest.raises(PeerUnavailable, match=r"no server answers at http://127.0.0.1:9/v1") as caught:
        run(absent)

    assert caught.value.fields == {"peer": "http://127.0.0.1:9/v1", "deadline_s": 5.0}


def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        deaf = OpenAIServer(url=f"http://127.0.0.1:{silent.getsockname()[1]}")

        with pytest.raises(PeerUnavailable, match=r"no answer within 0\.3 s"):
            run(deaf, connect_deadline_s=0.3)


def test_a_model_that_is_not_served_is_refused_with_those_that_are(server: OpenAIServer) -> None:
    with pytest.raises(ConfigError, match=r"'huge' is not served .*; use one of tiny"):
        run(server, model="huge")


def test_a_request_form_that_the_server_refuses_ends_the_run_at_the_warm_up(server: OpenAIServer) -> None:
    async def refuse(*_: object) -> web.StreamResponse | None:
        return web.json_response({"error": {"message": "ignore_eos: unknown field"}}, status=400)

    server.misbehave = refuse

    with pytest.raises(ConfigError, match="refused the warm-up request: 400: ignore_eos: unknown field"):
        run(server, warmup=1)
    assert len(server.bodies) == 1


def test_the_warm_up_is_of_other_prompts_and_is_not_measured(server: OpenAIServer) -> None:
    result = run(server, warmup=3)

    assert len(server.bodies) == 11
    assert result.sides[0].summary.requests == 8
    prompts = [json.dumps(body["messages"]) for body in server.bodies]
    assert not set(prompts[:3]) & set(prompts[3:])


def test_nothing_succeeded_is_a_problem(server: OpenAIServer) -> None:
    async def refuse(*_: object) -> web.StreamResponse | None:
        return await _internal()

    server.misbehave = refuse

    assert find_problems(run(server)) == ["A: no request succeeded (8 http_500)"]


def bench(*arguments: str, expect: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command itself."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "bench", "serve", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_DEADLINE_S,
        env=os.environ | {"COLUMNS": "120"} | (env or {}),
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_the_command_prints_a_table_and_writes_json_and_a_picture(server: OpenAIServer, tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "ttft.png"
    shown = bench(
        *("--url", f"on={server.url}", "--compare-body", '{"kvstore": {"no_read": true}}', "--requests", "12"),
        *("--input-tokens", "8-64", "--output-tokens", "4", "--slo", "ttft=5,tpot=5", "--seed", "3", "--rounds", "2"),
        *("--json", str(report), "--plot", str(picture)),
    )
    written = json.loads(report.read_text())

    for word in ("TTFT", "TPOT", "ITL", "E2E", "B / A", "goodput", "outputs of 12 requests: the same"):
        assert word in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert [side["summary"]["succeeded"] for side in written["sides"]] == [12, 12]
    assert [side["extra_body"] for side in written["sides"]] == [{}, {"kvstore": {"no_read": True}}]
    assert written["sides"][0]["summary"]["output_hash"] == written["sides"][1]["summary"]["output_hash"]
    assert written["comparison"]["compared"] == 12
    assert len(written["sides"][0]["requests"]) == 12
    assert "no_read" in json.dumps(server.bodies)


def test_json_on_standard_output_is_alone_there(server: OpenAIServer) -> None:
    shown = bench("--url", server.url, "--requests", "2", "--json", "-")

    assert json.loads(shown.stdout)["sides"][0]["summary"]["succeeded"] == 2


@pytest.mark.parametrize("workload", ["shared-system", "multi-turn", "document-qa", "trace"])
def test_every_workload_runs_from_the_command_line(server: OpenAIServer, tmp_path: Path, workload: str) -> None:
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2, 3]}
    lines = [line, line | {"timestamp": 50, "hash_ids": [1, 2, 4]}]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    more = {
        "shared-system": ["--requests", "6", "--system-tokens", "16", "--rate", "50"],
        "multi-turn": ["--conversations", "2", "--turns", "3", "--scenario", "burst"],
        "document-qa": ["--documents", "2", "--questions", "3", "--document-tokens", "64"],
        "trace": ["--trace", str(trace), "--trace-block-tokens", "8", "--time-scale", "2"],
    }
    short = [] if workload == "trace" else ["--input-tokens", "8", "--output-tokens", "3"]
    shown = bench("--url", server.url, "--workload", workload, *more[workload], *short, "--json", "-")
    (side,) = json.loads(shown.stdout)["sides"]

    assert side["summary"]["succeeded"] == {"trace": 2}.get(workload, 6)
    assert side["summary"]["cached_tokens"] > 0
    if workload == "trace":
        assert side["requests"][1]["due_s"] == 0.1


def test_degraded_runs_from_the_command_line(server: OpenAIServer) -> None:
    short = ("--url", server.url, "--requests", "6", "--output-tokens", "3", "--json", "-")
    cold = json.loads(bench(*short, "--scenario", "all-cold", "--cold-by", "kvstore", "--nonce", "n1").stdout)
    killed = json.loads(bench(*short, "--scenario", "sidecar-killed", "--at", "0", "--run", "echo gone").stdout)

    assert (cold["nonce"], cold["sides"][0]["cold_by"]) == ("n1", "kvstore")
    assert {body["kvstore"]["salt"] for body in server.bodies[1:7]} == {f"n1-A-{number}.0" for number in range(6)}
    assert (killed["sides"][0]["incident"]["exit_code"], killed["sides"][0]["incident"]["output"]) == (0, "gone")


def test_prompts_of_token_ids(server: OpenAIServer) -> None:
    bench("--url", server.url, "--requests", "2", "--api", "completions", "--token-ids", "7-9", "--input-tokens", "40")

    assert {token_id for body in server.bodies for token_id in body["prompt"]} == {7, 8, 9}
    assert [len(body["prompt"]) for body in server.bodies] == [40, 40, 40]


def test_different_outputs_end_with_1_and_say_where() -> None:
    with serving(OpenAIServer()) as one, serving(OpenAIServer(twist="x")) as other:
        shown = bench("--url", one.url, "--compare", f"other={other.url}", "--requests", "3", expect=1)

    assert "outputs differ in 3 of 3 requests, first in request 0.0" in shown.stderr.replace("\n", " ")


def test_a_key_is_sent_from_the_variable_that_is_named(server: OpenAIServer) -> None:
    bench("--url", server.url, "--requests", "1", "--api-key-env", "BENCH_KEY", env={"BENCH_KEY": "k1"})

    assert server.headers[-1]["Authorization"] == "Bearer k1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--url: absent; use one --url"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9/v1"),
        (
            ["--url", "http://h", "--turns", "3"],
            "--turns: 3 is of no use with --workload random; use --workload multi-turn",
        ),
        (["--url", "http://h", "--at", "3"], "--at: 3.0; use it with --scenario sidecar-killed only"),
        (["--url", "http://h", "--scenario", "sidecar-killed", "--at", "3"], "--run: absent; use"),
        (["--url", "http://h", "--scenario", "burst", "--arrival", "closed"], "--arrival: closed; use burst"),
        (["--url", "http://h", "--rounds", "2"], "--rounds: 2; use 1 with one server"),
        (["--url", "http://h", "--token-ids", "5-9"], "--token-ids: 5-9; use --api completions"),
        (
            ["--url", "http://h", "--json", "/no/such/folder/x.json"],
            "--json: /no/such/folder/x.json; use a file in a folder",
        ),
        (["--url", "http://h", "--plot", "x.gif"], "use a name that ends in .png"),
        (["--url", "http://h", "--api-key-env", "NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["--url", "http://h", "--workload", "trace", "--trace", "/no/such.jsonl"], "/no/such.jsonl: cannot be read"),
    ],
)
def test_wrong_input_ends_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvstore", "bench", "serve", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert message in shown.err
    assert shown.err.splitlines()[-1].startswith("error: ")
    assert shown.out == ""


@pytest.mark.parametrize(("module", "extra"), [("aiohttp", "engine"), ("matplotlib", "plot")])
def test_a_missing_library_is_named_with_its_extra(module: str, extra: str) -> None:
    """As on a machine without it: the import system finds no such module."""
    hide = f"import importlib.util as u; find = u.find_spec; u.find_spec = lambda n, *a: None if n == {module!r} else find(n, *a)"
    arguments = ["bench", "serve", "--url", "http://h", "--plot", "x.png"]
    run_main = f"import sys; sys.argv[1:] = {arguments}; from kvstore.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}; {run_main}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_DEADLINE_S,
    )

    assert done.returncode == 2
    assert f"{module} is not installed; use pip install 'kvstore-tiered[{extra}]'" in done.stderr
