"""The engine's part of a trace: a span for the request, its prefill, each sample's decoding, whatever becomes of it."""

import numpy as np
import pytest
from fake_connector import FakeConnector, FakeStore, Temper
from recording_tracer import ABOVE, RecordingTracer
from tiny_llama import random_prompt

from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SamplingParams

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
TRACED = RequestOptions(traceparent=ABOVE)


@pytest.fixture
def tracer() -> RecordingTracer:
    return RecordingTracer()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_prompt(np.random.default_rng(8), 61)


def test_prefill_and_decode_follow_one_another_below_the_request(make_llm, prompt, tracer):
    llm = make_llm(tracer=tracer)
    llm.generate([prompt], GREEDY, options=TRACED)

    (request,), (prefill,), (decode,) = (tracer.named(name) for name in ("llm_request", "prefill", "decode"))
    assert request.above == ABOVE
    assert prefill.above == decode.above == request.traceparent
    assert request.at_s <= prefill.at_s < prefill.end_s == decode.at_s < decode.end_s <= request.end_s
    assert prefill.attributes["kvstore.tokens.computed"] == 61
    assert (request.attributes["gen_ai.usage.input_tokens"], request.attributes["gen_ai.usage.output_tokens"]) == (
        61,
        6,
    )
    assert request.attributes["gen_ai.response.finish_reasons"] == "length"
    assert request.attributes["gen_ai.latency.time_to_first_token"] > 0


def test_each_sample_has_its_own_decoding_and_they_share_a_prefill(make_llm, prompt, tracer):
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=3, temperature=1.0, seed=1)
    make_llm(tracer=tracer).generate([prompt], params, options=TRACED)

    assert len(tracer.named("prefill")) == len(tracer.named("llm_request")) == 1
    assert sorted(span.attributes["kvstore.sample"] for span in tracer.named("decode")) == [0, 1, 2]
    assert tracer.named("llm_request")[0].attributes["gen_ai.usage.output_tokens"] == 18
    assert all(span.ended for span in tracer.spans)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_request_ends_where_it_is(make_llm, prompt, tracer, num_steps):
    llm = make_llm(tracer=tracer)
    request_id = llm.add_request(prompt, GREEDY, options=TRACED)
    for _ in range(num_steps):
        llm.step()
    llm.abort(request_id)

    assert all(span.ended for span in tracer.spans)
    (request,) = tracer.named("llm_request")
    assert request.attributes["gen_ai.response.finish_reasons"] == "abort"
    assert len(tracer.named("decode")) == (1 if num_steps == 4 else 0)
    assert not llm._spans._open


def test_a_failed_load_that_ends_the_request_ends_its_span(make_llm, prompt, tracer):
    store = FakeStore()
    make_llm(connector_factory=FakeConnector(store).factory).generate([prompt], GREEDY)
    connector = FakeConnector(store, Temper(block_fails=1.0))
    wish = RequestOptions(load_failure="fail", traceparent=ABOVE)
    make_llm(connector_factory=connector.factory, tracer=tracer).generate([prompt], GREEDY, options=wish)

    (request,) = tracer.spans
    assert request.ended
    assert request.attributes["gen_ai.response.finish_reasons"] == "error"


def test_without_a_context_a_request_begins_a_trace_and_unsampled_ones_have_nothing_below(make_llm, prompt, tracer):
    make_llm(tracer=tracer).generate([prompt], GREEDY)
    assert tracer.named("llm_request")[0].above == ""

    off = RecordingTracer(samples=False)
    make_llm(tracer=off).generate([prompt], GREEDY, options=TRACED)
    assert [span.name for span in off.spans] == ["llm_request"]
