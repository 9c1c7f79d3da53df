"""What a request may wish: how it ends, what it tells of its tokens, whom it shares KV with, what a failed load means."""

import numpy as np
import pytest
import torch
from fake_connector import FakeConnector, FakeStore, Temper
from test_engine_with_store import interrupt_once
from tiny_llama import random_prompt

from kvstore.core.clock import ManualClock
from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.admission import QueueFull
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SampleSpec, SamplingParams, sample
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.protocol import CacheOptions

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
FAIL = RequestOptions(load_failure="fail")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_prompt(np.random.default_rng(8), 61)


@pytest.fixture
def store(make_llm, prompt) -> FakeStore:
    """It holds the prompt, and what was generated."""
    store = FakeStore()
    make_llm(connector_factory=FakeConnector(store).factory).generate([prompt], GREEDY)
    return store


def wishes(**cache: object) -> RequestOptions:
    return RequestOptions(cache=CacheOptions(**cache))


# --- stop strings ------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(make_llm, prompt) -> str:
    text = make_llm().generate([prompt], GREEDY)[0].text
    assert len(text) > 12
    return text


@pytest.mark.parametrize("settings", [{}, {"num_pages": 22}], ids=["alone", "preempted"])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_string_ends_the_text_before_it(make_llm, prompt, text, length, settings):
    stop = text[6 : 6 + length]
    llm = make_llm(**settings)
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=("not in it", stop))

    first, second = llm.generate([prompt, prompt[::-1]], [params, GREEDY])

    assert first.finish_reason is FinishReason.STOP
    assert first.text == text[: text.index(stop)]
    assert llm.tokenizer.decode(first.token_ids).startswith(first.text + stop[0])
    assert len(first.token_ids) < len(second.token_ids) == 24


def test_a_stream_never_shows_a_part_of_a_stop_string(make_llm, prompt, text):
    stop = text[6:10]
    shown = ""
    for delta in make_llm().stream(prompt, SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,))):
        shown += delta.text
        assert text[: text.index(stop)].startswith(shown)

    assert shown == delta.output.text == text[: text.index(stop)]


def test_what_was_held_back_is_shown_at_the_end(make_llm, prompt, text):
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=(text[-3:] + "\x00",))

    output = make_llm().generate([prompt], params)[0]

    assert (output.text, output.finish_reason) == (text, FinishReason.LENGTH)


# --- logprobs ----------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_unscaled_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=2.0, top_k=5, seed=4, logprobs=6)

    tokens = sample(logits, [SampleSpec(params, i) for i in range(3)])

    reference = logits.double().log_softmax(-1)
    for row, token in zip(reference, tokens, strict=True):
        assert token.logprob.logprob == pytest.approx(float(row[token.token_id]), abs=1e-5)
        best = row.sort(descending=True)
        assert [i for i, _ in token.logprob.top] == best.indices[:6].tolist()
        assert [v for _, v in token.logprob.top] == pytest.approx(best.values[:6].tolist(), abs=1e-5)


def test_equal_logprobs_are_listed_by_token_id():
    (token,) = sample(torch.zeros(1, 9), [SampleSpec(SamplingParams(logprobs=9), 0)])

    assert [token_id for token_id, _ in token.logprob.top] == list(range(9))


def test_each_token_has_its_logprobs_when_they_are_asked_for(make_llm, prompt):
    llm = make_llm()
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)

    deltas = list(llm.stream(prompt, params))
    plain = llm.generate([prompt], GREEDY)[0]

    output = deltas[-1].output
    assert output.logprobs == tuple(delta.logprob for delta in deltas)
    for entry, token_id, gap in zip(output.logprobs, output.token_ids, output.logit_gaps, strict=True):
        assert entry.top[0] == (token_id, entry.logprob)
        assert entry.top[0][1] - entry.top[1][1] == pytest.approx(gap, abs=1e-4)
    assert plain.logprobs is None
    assert llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=0))[0].logprobs[0].top == ()


# --- failed loads ------------------------------------------------------------------------------------------------------


def test_a_failed_load_ends_a_request_that_wished_so(make_llm, prompt, store):
    fake = FakeConnector(store, Temper(block_fails=1.0))
    llm = make_llm(connector_factory=fake.factory)

    output = llm.generate([prompt], GREEDY, options=FAIL)[0]

    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "15 of 15 blocks did not come from the store"
    assert (output.token_ids, output.text, output.ttft_s) == ((), "", None)
    llm.check()
    assert llm.stats().num_free_pages == 128


def test_its_end_is_a_delta_without_a_token_for_each_sample(make_llm, prompt, store):
    llm = make_llm(connector_factory=FakeConnector(store, Temper(load_loses_tail=1.0)).factory)
    llm.add_request(prompt, SamplingParams(n=2, seed=1), options=FAIL, request_id="fails")
    llm.add_request(prompt, GREEDY, request_id="goes on")
    deltas = []
    while llm.has_unfinished:
        deltas += llm.step()
        llm.check()

    ends = [delta for delta in deltas if delta.request_id == "fails"]
    assert [(d.index, d.token_id, d.output.finish_reason) for d in ends] == [(i, None, "error") for i in range(2)]
    assert deltas[-1].output.finish_reason is FinishReason.LENGTH
    assert llm.stats().num_finished[FinishReason.ERROR] == 2


def test_a_load_that_comes_ends_nothing(make_llm, prompt, store):
    llm = make_llm(connector_factory=FakeConnector(store, Temper(max_load_delay=3)).factory)

    output = llm.generate([prompt], GREEDY, options=FAIL)[0]

    assert (output.num_fetched_tokens, output.finish_reason) == (60, FinishReason.LENGTH)


def test_a_stream_whose_load_fails_ends(make_llm, prompt, store):
    llm = make_llm(connector_factory=FakeConnector(store, Temper(block_fails=1.0)).factory)

    (delta,) = llm.stream(prompt, GREEDY, options=FAIL)

    assert delta.output.finish_reason is FinishReason.ERROR


def test_a_load_given_up_with_a_broken_step_ends_the_request_too(make_llm, monkeypatch, prompt, store):
    connectors = []
    fake = FakeConnector(store)
    llm = make_llm(connector_factory=lambda spec: connectors.append(fake.factory(spec)) or connectors[0])
    llm.add_request(prompt, GREEDY, options=FAIL)
    interrupt_once(monkeypatch, connectors[0], "start_load", KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        llm.step()

    assert llm.has_unfinished  # its end has yet to be handed out
    (delta,) = llm.step()
    assert delta.output.finish_reason is FinishReason.ERROR
    assert not llm.has_unfinished
    llm.check()


# --- caches ------------------------------------------------------------------------------------------------------------


def test_salts_never_meet_in_the_pages_nor_in_the_store(make_llm, prompt):
    store = FakeStore()
    llm = make_llm(connector_factory=FakeConnector(store).factory)

    outputs = [llm.generate([prompt], GREEDY, options=wishes(salt=salt))[0] for salt in ("", "a", "b", "a", "")]

    assert [output.num_local_cached_tokens for output in outputs] == [0, 0, 0, 60, 60]
    assert [output.num_fetched_tokens for output in outputs] == [0] * 5
    assert len({output.token_ids for output in outputs}) == 1
    assert len(store.blocks) == 3 * ((61 + 23) // 4)


def test_the_salt_is_in_the_hash_of_every_block_generated_ones_too(make_llm, prompt):
    store = FakeStore()
    llm = make_llm(connector_factory=FakeConnector(store).factory)

    output = llm.generate([prompt[:3]], GREEDY, options=wishes(salt="x"))[0]

    scheme = llm.spec.hash
    tokens = [*prompt[:3], *output.token_ids][:-1]
    assert set(store.blocks) == set(scheme.hash_blocks(tokens, parent=scheme.root([b"x"])))


def test_no_read_finds_nothing_in_the_pages(make_llm, prompt):
    llm = make_llm()
    llm.generate([prompt], GREEDY)

    assert llm.generate([prompt], GREEDY, options=wishes(no_read=True))[0].num_prefilled_tokens == 61
    assert llm.generate([prompt], GREEDY)[0].num_local_cached_tokens == 60


def test_no_store_leaves_nothing_to_be_found_in_the_pages(make_llm, prompt):
    llm = make_llm()
    llm.generate([prompt], GREEDY, options=wishes(no_store=True))

    assert llm.generate([prompt], GREEDY)[0].num_local_cached_tokens == 0


@pytest.mark.parametrize(
    "cache",
    [{"salt": "x" * 257}, {"salt": "\ud800"}, {"session_id": "x" * 201}, {"ttl_s": -1}, {"pin_s": float("nan")}],
    ids=["long", "no_utf8", "long_session", "negative", "nan"],
)
def test_a_wish_that_means_nothing_is_named(cache):
    with pytest.raises(ConfigError) as caught:
        CacheOptions(**cache)

    assert caught.value.fields["field"] == next(iter(cache))


# --- resuming ----------------------------------------------------------------------------------------------------------


def test_a_preempted_request_resumes_from_the_store_generated_tokens_included(make_llm, prompt):
    """The engine's own pages find nothing here, so that what is not fetched is computed again."""
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [prompt[:20], prompt[20:40], prompt[40:60]]
    expected = make_llm().generate(prompts, long)
    fake = FakeConnector(FakeStore(), Temper(max_load_delay=2, max_save_delay=4))
    llm = make_llm(connector_factory=fake.factory, num_pages=30, prefix_caching=False)

    outputs = llm.generate(prompts, long)

    resumed = [output for output in outputs if output.num_preemptions]
    assert resumed
    for output in resumed:
        assert output.num_resumed_tokens == output.num_fetched_tokens > 20, "more than the prompt"
        assert output.num_prefilled_tokens < 20 + 4 * output.num_preemptions + 4, (
            "of what was full, nothing is computed"
        )
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert llm.stats().total.resumed == sum(output.num_resumed_tokens for output in outputs)


# --- the queue and the figures ------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(make_llm, prompt):
    llm = make_llm(max_waiting=2, max_batch=1, clock=ManualClock())
    llm.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    llm.step()
    for _ in range(2):
        llm.add_request(prompt, GREEDY)

    with pytest.raises(QueueFull) as caught:
        llm.add_request(prompt, GREEDY)
    with pytest.raises(QueueFull):
        next(llm.stream(prompt, GREEDY))

    assert caught.value.fields == {"limit": "max_waiting", "value": 2, "retry_after_s": 1.0}
    while llm.stats().num_waiting == 2:
        llm.step()
    llm.add_request(prompt, GREEDY)
    assert llm.stats().num_refused == 2


def test_a_burst_that_the_batch_has_room_for_is_no_queue(make_llm, prompt):
    llm = make_llm(max_waiting=1, max_batch=4)

    llm.add_request(prompt, SamplingParams(n=2, max_tokens=2))
    for _ in range(3):
        llm.add_request(prompt, GREEDY)

    assert llm.stats().num_waiting == 4


def test_generate_may_have_more_prompts_than_may_wait(make_llm, prompt):
    outputs = make_llm(max_waiting=1, max_batch=2).generate([prompt[:n] for n in range(1, 9)], GREEDY)

    assert [output.num_prompt_tokens for output in outputs] == list(range(1, 9))


def test_stats_tell_what_is_where(make_llm, prompt, store):
    llm = make_llm(connector_factory=FakeConnector(store, Temper(max_load_delay=50)).factory, max_batch=2)
    llm.add_request(prompt, GREEDY, request_id="loads")
    llm.add_request(prompt[::-1], GREEDY, request_id="runs")
    llm.add_request(prompt[:5], GREEDY, request_id="waits")
    llm.step()

    now = llm.stats()

    assert (now.num_waiting, now.num_loading, now.num_running, now.num_draining) == (1, 1, 1, 0)
    assert (now.num_pages, now.num_free_pages, now.max_waiting) == (128, 128 - 2 * 16, 1024)
    assert now.total.prefilled == 32
    while llm.has_unfinished:
        before, now = now.total, llm.stats()
        assert now.total.generated >= before.generated
        llm.step()
    assert llm.stats().total.generated == 3 * 24
    assert llm.stats().num_finished[FinishReason.LENGTH] == 3
