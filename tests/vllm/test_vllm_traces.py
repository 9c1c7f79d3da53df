"""A request to a vLLM server with a trace context: its connector's and the sidecar's spans are in that trace."""

import sys
from pathlib import Path

import pytest
from make_model import make_random_model
from servers import BLOCK_TOKENS, Sidecar, VllmServer, assert_same_tokens

sys.path.append(str(Path(__file__).parent.parent / "e2e"))

PROMPT = [11 + i * i % 7919 for i in range(1000)]
NUM_LOADABLE = (len(PROMPT) - 1) // BLOCK_TOKENS


def test_connector_and_sidecar_put_their_spans_below_the_clients(
    cache: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM hands the context on where its own tracing is on, whose span is beside ours."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="vLLM came without OpenTelemetry")
    from otlp_collector import running_collector, traceparent

    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        sidecar = Sidecar(directory, "--trace")
        model = make_random_model(cache / "random")
        args = ("--otlp-traces-endpoint", f"{collector.endpoint}/v1/traces")
        env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        server = VllmServer("traced", model, directory, store=sidecar.socket, extra={"trace": True}, args=args, env=env)
        try:
            sidecar.start()
            server.start()
            cold = server.complete(PROMPT)
            server.forget_local_prefixes()
            text, trace_id, span_id = traceparent(1)
            warm = server.complete(PROMPT, headers={"traceparent": text})
            names = ("llm_request", "kvstore.match", "kvstore.load", "kvstore.fetch")
            found = collector.wait_for(*names, trace_id=trace_id)
        finally:
            server.stop()
            sidecar.kill()

    assert_same_tokens(warm, cold)
    assert {found[name].parent_id for name in ("llm_request", "kvstore.match", "kvstore.load")} == {span_id}
    assert found["kvstore.fetch"].parent_id == found["kvstore.load"].span_id
    assert found["kvstore.load"].process[0] == "kvstore-connector"
    assert found["kvstore.match"].attributes["kvstore.plan.blocks"] == NUM_LOADABLE
    assert found["kvstore.match"].attributes["kvstore.plan.reason"]
    assert found["kvstore.load"].attributes["kvstore.outcome"] == "loaded"
    assert found["kvstore.fetch"].attributes["kvstore.blocks_granted"] == NUM_LOADABLE
