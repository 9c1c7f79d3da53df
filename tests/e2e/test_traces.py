"""One request's trace over engine, sidecar, drive and another node, as a real collector gets it; and what happens without one."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from api_server_process import ANSWER_DEADLINE_S, BLOCK, MODEL, ApiServerProcess, running_api_server
from cluster_nodes import ClusterNode, cluster_in
from engines import Bench
from otlp_collector import MUCH_BYTES, Collector, Received, running_collector, traceparent
from sidecar_process import SidecarProcess, connected, running_sidecar, tool, wait_until

from kvstore.core.errors import ConfigError
from kvstore.tracing import open_tracer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROMPT_TOKENS = 121
LOADABLE_BLOCKS = 120 // BLOCK


class Traced(NamedTuple):
    """Two nodes, the first with a drive and all of the prompt on it; an engine beside the second."""

    collector: Collector
    owner: ClusterNode
    node: ClusterNode
    engine: ApiServerProcess
    prompt: list[int]


def ask(engine: ApiServerProcess, prompt: list[int], **headers: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=ANSWER_DEADLINE_S)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
    reply = connection.getresponse()
    answer = reply.read()
    connection.close()
    assert reply.status == 200, answer


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, bench_of_module: Bench) -> Iterator[Traced]:
    folder, patch = tmp_path_factory.mktemp("traces"), pytest.MonkeyPatch()
    with running_collector() as collector, cluster_in(folder) as cluster, patch.context() as env:
        env.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        env.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        drive = ("--nvme", str(folder / "drive"), "--nvme-bytes", "16MiB")
        owner, node = cluster.start("owner", "node", flags=("--trace",), own={"owner": drive})
        (prompt,) = bench_of_module.prompts(PROMPT_TOKENS)
        with bench_of_module.own_engines():
            writer = bench_of_module.engine(owner.socket)
            writer.ask(prompt)
            spec = writer.llm.spec
        wait_until(lambda: owner.counter("demoted_blocks_total") >= LOADABLE_BLOCKS, "all on the drive")
        assert owner.stop() == 0  # what was written is committed
        owner.start()
        keys = spec.hash.hash_blocks(prompt)[:LOADABLE_BLOCKS]
        flags = ("--socket", str(node.socket), "--trace")
        with running_api_server(bench_of_module.model, "engine", *flags) as engine, tool(node) as client:
            wait_until(
                lambda: any(each.num_blocks == len(keys) for each in client.locate(spec.namespace(), keys)), "found"
            )
            yield Traced(collector, owner, node, engine, prompt)


def test_one_request_is_one_trace_over_four_processes(traced: Traced) -> None:
    """Client -> engine -> connector -> sidecar -> other sidecar -> its drive, each below the one that asked it."""
    text, trace_id, span_id = traceparent(1)

    ask(traced.engine, traced.prompt, traceparent=text)

    names = ("llm_request", "prefill", "decode", "kvstore.match", "kvstore.load", "kvstore.fetch", "kvstore.borrow")
    found = traced.collector.wait_for(*names, "kvstore.lend", "kvstore.read", "kvstore.save", trace_id=trace_id)
    assert {name: parent_of(found, each) for name, each in found.items() if name != "llm_request"} == {
        "prefill": "llm_request",
        "decode": "llm_request",
        "kvstore.match": "llm_request",
        "kvstore.load": "llm_request",
        "kvstore.save": "llm_request",  # of what it generated
        "kvstore.fetch": "kvstore.load",
        "kvstore.borrow": "kvstore.fetch",
        "kvstore.lend": "kvstore.borrow",
        "kvstore.read": "kvstore.lend",
    }
    assert found["llm_request"].parent_id == span_id
    assert {found[name].process[0] for name in ("llm_request", "prefill", "kvstore.load")} == {"kvstore-engine"}
    assert {name: each.process for name, each in found.items() if each.process[0] == "kvstore"} == {
        "kvstore.match": ("kvstore", "node"),
        "kvstore.fetch": ("kvstore", "node"),
        "kvstore.borrow": ("kvstore", "node"),
        "kvstore.lend": ("kvstore", "owner"),
        "kvstore.read": ("kvstore", "owner"),
    }
    for child, parent in (
        ("kvstore.load", "llm_request"),
        ("kvstore.borrow", "kvstore.fetch"),
        ("kvstore.read", "kvstore.lend"),
    ):
        assert found[parent].start_ns <= found[child].start_ns <= found[child].end_ns, child
    assert found["kvstore.read"].end_ns <= found["kvstore.lend"].end_ns


def test_spans_say_why_and_how_much(traced: Traced) -> None:
    """Of the request of the test before, and of another that its engine has itself."""
    found = {each.name: each.attributes for each in traced.collector.spans if each.trace_id.endswith(f"{1:016x}")}
    block_nbytes = found["kvstore.read"]["kvstore.bytes"] // found["kvstore.read"]["kvstore.blocks"]

    plan = found["kvstore.match"]
    assert plan["kvstore.tokens"] == PROMPT_TOKENS
    assert plan["kvstore.found.peer"] == plan["kvstore.blocks_found"] == plan["kvstore.plan.blocks"] == LOADABLE_BLOCKS
    assert plan["kvstore.plan.reason"]
    explained = records(traced.node, plan["kvstore.request_id"])
    assert [each.plan.reason for each in explained] == [plan["kvstore.plan.reason"]]
    assert found["kvstore.fetch"]["kvstore.blocks_granted"] == LOADABLE_BLOCKS
    assert found["kvstore.fetch"]["kvstore.blocks_in_ram"] == 0
    assert found["kvstore.fetch"]["kvstore.outcome"] == found["kvstore.load"]["kvstore.outcome"] == "loaded"
    assert found["kvstore.borrow"]["kvstore.node"] == "owner"
    assert found["kvstore.borrow"]["kvstore.bytes"] == found["kvstore.borrow"]["kvstore.blocks"] * block_nbytes
    assert found["kvstore.read"]["kvstore.tier"] == "nvme"
    assert found["kvstore.lend"]["kvstore.blocks_granted"] == LOADABLE_BLOCKS
    prefill = found["prefill"]
    assert prefill["kvstore.tokens.computed"] + prefill["kvstore.tokens.fetched"] == PROMPT_TOKENS
    assert found["llm_request"]["gen_ai.usage.input_tokens"] == PROMPT_TOKENS
    assert found["llm_request"]["gen_ai.usage.output_tokens"] == 4


def test_a_request_that_is_not_sampled_leaves_no_span_and_one_without_context_begins_a_trace(traced: Traced) -> None:
    text, unsampled, _ = traceparent(2, sampled=False)
    before = {each.trace_id for each in traced.collector.spans}

    ask(traced.engine, traced.prompt, traceparent=text)
    ask(traced.engine, traced.prompt, traceparent="00-nonsense")

    def roots() -> list[Received]:
        new = [each for each in traced.collector.spans if each.trace_id not in before]
        return [each for each in new if each.name == "llm_request"]

    wait_until(lambda: len(roots()) == 1, "a trace of its own")
    assert roots()[0].parent_id == ""
    assert unsampled not in {each.trace_id for each in traced.collector.spans}


def test_what_was_sent_is_counted(traced: Traced) -> None:
    def settled() -> bool:
        here = sum(each.process == ("kvstore", "node") for each in traced.collector.spans)
        return traced.node.counter("trace_spans_exported_total") == here > 0

    wait_until(settled, "as many as came")
    figures = traced.engine.figures()
    assert figures["kvstore_engine_trace_spans_total exported"] > 0
    assert figures["kvstore_engine_trace_spans_total dropped"] == 0
    assert traced.node.counter("trace_spans_dropped_total") == traced.node.counter("trace_spans_failed_total") == 0


def parent_of(found: dict[str, Received], span: Received) -> str:
    return next((each.name for each in found.values() if each.span_id == span.parent_id), "")


def records(node: ClusterNode, request_id: str) -> list:
    with tool(node) as client:
        return client.explain(request_id=request_id)


@pytest.mark.parametrize("state", ["dead", "hangs"])
def test_a_collector_that_does_not_answer_changes_nothing(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Requests are served as ever, what is lost is counted, and the sidecar ends in time."""
    with running_collector(hangs=state == "hangs") as collector:
        if state == "dead":
            collector.close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        with running_sidecar(tmp_path, "--no-grpc", "--trace") as sidecar, bench.own_engines():
            engine = bench.engine(sidecar.socket)
            prompts = bench.prompts(61, 77)
            bench.expect_same(engine.ask(*prompts), *prompts)
            with connected(sidecar, spec=engine.llm.spec) as client:
                keys = engine.llm.spec.hash.hash_blocks(prompts[0])
                for i in range(40):
                    text, _, _ = traceparent(i + 1)
                    assert client.match(client.namespaces[0].namespace, keys, traceparent=text).num_blocks == 15
                lost = ("trace_spans_dropped_total", "trace_spans_failed_total")
                wait_until(lambda: sum(client.stats().counters[each] for each in lost) >= 40 - 16, "counted")
            engine.llm.reset_prefix_cache()
            bench.expect_same(engine.ask(*prompts), *prompts)
            assert sidecar.stop() == 0


@pytest.mark.parametrize("flag", [(), ("--trace",)])
def test_opentelemetry_is_imported_when_tracing_is_on_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # a line in the log for every import
    with running_sidecar(tmp_path, *flag) as sidecar:
        use(sidecar)
        imported = {
            line.rpartition("|")[2].strip() for line in sidecar.log.splitlines() if line.startswith("import time:")
        }

    assert "kvstore.dispatcher" in imported
    assert any(name.startswith("opentelemetry") for name in imported) is bool(flag)


def use(sidecar: SidecarProcess) -> None:
    with connected(sidecar) as client:
        client.match(client.namespaces[0].namespace, [b"k" * 16], traceparent=traceparent(1)[0])


def test_the_environment_names_service_and_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenTelemetry's own programs take it; attributes of ours stay beside those of the user."""
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "cache-eu")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
        tracer = open_tracer("kvstore", **{"service.instance.id": "n1"})
        text, unsampled, _ = traceparent(1, sampled=False)
        began_s = time.monotonic()
        span = tracer.start("ten seconds ago", text, at_s=began_s - 10)
        span.end({"a": 1}, at_s=began_s)
        tracer.close(5.0)

        (received,) = collector.spans
        assert received.trace_id == unsampled
        assert received.process == ("cache-eu", "n1")
        assert received.resource["deployment.environment.name"] == "test"
        assert received.end_ns - received.start_ns == pytest.approx(10e9, abs=1e6)
        assert abs(time.time_ns() - received.end_ns) < 5e9
        assert tracer.counts() == {"exported": 1, "dropped": 0, "failed": 0}

        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        off = open_tracer("kvstore")
        assert off.start("nothing", "").traceparent == ""
        off.close(5.0)
        assert len(collector.spans) == 1


def test_a_full_queue_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a collector that takes requests and never answers; the end comes within its deadline."""
    with running_collector(hangs=True) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        tracer = open_tracer("kvstore")
        tracer.start("first", "").end({})
        wait_until(lambda: collector.num_requests == 1, "it is being sent")
        began_s = time.monotonic()
        for _ in range(100):
            tracer.start("more", "").end({})
        assert time.monotonic() - began_s < 1.0
        assert tracer.counts() == {"exported": 0, "dropped": 96, "failed": 0}

        began_s = time.monotonic()
        tracer.close(0.2)
        tracer.close(0.2)
        assert time.monotonic() - began_s < 5.0
        tracer.start("late", "").end({})
        assert tracer.counts() == {"exported": 0, "dropped": 97, "failed": 5}  # each is counted once


@pytest.mark.parametrize(("how", "counted"), [("endless", "exported"), ("moved", "failed")])
def test_of_an_answer_a_piece_is_read_and_one_that_sends_us_elsewhere_is_no_success(
    monkeypatch: pytest.MonkeyPatch, how: str, counted: str
) -> None:
    with running_collector(**{how: True}) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracer = open_tracer("kvstore")
        tracer.start("one", "").end({})
        tracer.close(10.0)

        assert tracer.counts() == {"exported": 0, "dropped": 0, "failed": 0} | {counted: 1}
        assert collector.num_answered_bytes < MUCH_BYTES / 4  # what fits into sockets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "9" * 20),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1"),
    ],
)
def test_what_the_environment_asks_for_and_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    threads = threading.active_count()

    with pytest.raises(ConfigError, match=name):
        open_tracer("kvstore")
    assert threading.active_count() == threads
