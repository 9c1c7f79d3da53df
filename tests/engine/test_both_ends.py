"""The engine computes at the front of a load while it arrives at the back: the same tokens wherever they meet, and whether
blocks come fast, slowly, fail, or stop coming; and nobody else waits longer, nor finds what is not there."""

import numpy as np
import pytest
from fake_connector import FakeConnector, FakeStore, Temper
from test_layerwise import interrupt_once, run_to_end
from tiny_llama import random_prompt, same_tokens
from two_ended_connector import Pace, TwoEndedConnector

from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason

BLOCK, CHUNK = 4, 16
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
NUM_LOADED = 30  # blocks of the document; what follows it in a prompt is not in the store
NUM_NEW = 5


@pytest.fixture(scope="module")
def document() -> list[int]:
    return random_prompt(np.random.default_rng(3), NUM_LOADED * BLOCK)


@pytest.fixture(scope="module")
def prompt(document) -> list[int]:
    return document + random_prompt(np.random.default_rng(4), NUM_NEW)


@pytest.fixture
def store(make_llm, document) -> FakeStore:
    """It has the document."""
    store = FakeStore()
    make_llm(connector_factory=FakeConnector(store).factory).generate([[*document, 5]], SamplingParams(max_tokens=1))
    assert len(store.blocks) == NUM_LOADED
    return store


@pytest.fixture
def expected(make_llm, prompt):
    return make_llm(prefix_caching=False, chunk_tokens=CHUNK).generate([prompt], GREEDY)[0]


def connect(make_llm, fake, **settings):
    return make_llm(connector_factory=fake.factory, **({"chunk_tokens": CHUNK} | settings))


def always(pace: Pace):
    return lambda _job: pace


def test_front_and_back_meet_and_each_token_is_one_sides(make_llm, store, prompt, expected):
    fake = TwoEndedConnector(store)
    llm = connect(make_llm, fake)

    (output,) = llm.generate([prompt], GREEDY)

    total = llm.stats().total
    assert (fake.num_fills, fake.num_holes) == (1, 0)
    assert total.filled_front > 0 < total.filled_back
    assert total.filled_front + total.filled_back == NUM_LOADED * BLOCK
    assert output.num_fetched_tokens == total.filled_back
    assert output.num_prefilled_tokens == total.filled_front + NUM_NEW
    same_tokens(expected, output)


@pytest.mark.parametrize("blocks_a_look", [0, 1, 3, 100])
def test_where_they_meet_changes_not_a_bit(make_llm, store, prompt, expected, blocks_a_look):
    pace = Pace(lambda: blocks_a_look) if blocks_a_look else Pace(ends_at=NUM_LOADED - 1, late=1000)
    fake = TwoEndedConnector(store, pace=always(pace))

    (output,) = connect(make_llm, fake).generate([prompt], GREEDY)

    assert fake.num_loaded_blocks == output.num_fetched_tokens // BLOCK
    assert output.num_fetched_tokens == 0 or blocks_a_look
    assert output.token_ids == expected.token_ids
    assert output.logit_gaps == expected.logit_gaps


def test_it_is_off_when_it_is_not_wished(make_llm, store, prompt):
    fake = TwoEndedConnector(store)

    (output,) = connect(make_llm, fake, both_ends=False).generate([prompt], GREEDY)

    assert fake.num_fills == 0
    assert output.num_fetched_tokens == NUM_LOADED * BLOCK


def test_the_tests_would_notice_a_page_that_both_write(make_llm, store, prompt):
    fake = TwoEndedConnector(store)
    llm = connect(make_llm, fake)
    llm._runner._worker.claim_front = lambda _request_id, num_blocks: num_blocks
    llm.add_request(prompt, GREEDY)

    with pytest.raises(AssertionError, match=r"computed, not claimed|wrote a page"):
        run_to_end(llm)
    fake._loads.clear()
    fake.fills.clear()


@pytest.mark.parametrize("late", [0, 3, 1000], ids=["fails", "is late", "never comes"])
@pytest.mark.parametrize("ends_at", range(1, NUM_LOADED, 7))
def test_a_block_that_does_not_come_is_computed_and_what_came_is_kept(make_llm, store, prompt, expected, ends_at, late):
    fake = TwoEndedConnector(store, pace=always(Pace(lambda: 4, ends_at, late)))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")

    output = run_to_end(llm)["r"]

    assert output.num_fetched_tokens == fake.num_loaded_blocks * BLOCK
    assert output.num_fetched_tokens + output.num_prefilled_tokens == len(prompt)
    assert fake.num_holes == (fake.num_failed_blocks > 0)
    assert late < 1000 or not fake.num_holes, "nobody waits for it"
    same_tokens(expected, output)


def test_a_front_that_may_go_no_further_goes_on_when_it_may(make_llm, store, prompt, expected):
    fake = TwoEndedConnector(store, pace=always(Pace(ends_at=20, late=1000, bound=6)))

    (output,) = connect(make_llm, fake).generate([prompt], GREEDY)

    assert output.num_fetched_tokens == (NUM_LOADED - 21) * BLOCK
    same_tokens(expected, output)


def test_others_decode_in_every_step_of_a_fill(make_llm, store, prompt, expected):
    fake = TwoEndedConnector(store)
    llm = connect(make_llm, fake)
    other = [9] * 3
    alone = make_llm(prefix_caching=False).generate([other], GREEDY)[0]
    llm.add_request(other, GREEDY, request_id="other")
    llm.step()
    llm.add_request(prompt, GREEDY, request_id="r")

    outputs: dict = {}
    for _ in range(GREEDY.max_tokens - 1):
        deltas = llm.step()
        assert [delta.request_id for delta in deltas][:1] == ["other"]
        outputs |= {delta.request_id: delta.output for delta in deltas if delta.output}
    outputs = run_to_end(llm, outputs)

    assert llm.stats().total.filled_front > 0
    same_tokens(alone, outputs["other"])
    same_tokens(expected, outputs["r"])


def test_a_fill_shares_the_step_by_rank(make_llm, store, prompt):
    """An older request's chunks come first, though it has more of them; a younger one's do not pass it."""
    fake = TwoEndedConnector(store, pace=always(Pace(ends_at=NUM_LOADED - 1, late=1000)))
    llm = connect(make_llm, fake)
    rng = np.random.default_rng(6)
    llm.add_request(random_prompt(rng, 10 * CHUNK), SamplingParams(max_tokens=1), request_id="older")
    llm.add_request(prompt, SamplingParams(max_tokens=1), request_id="fill")
    llm.add_request(random_prompt(rng, 2 * CHUNK), SamplingParams(max_tokens=1), request_id="younger")

    order: list[str] = []
    while llm.has_unfinished:
        order += [delta.request_id for delta in llm.step()]
        assert "older" in order or llm.stats().total.filled_front == 0

    assert order == ["older", "fill", "younger"]


def test_what_is_filled_is_found_by_others_once_they_have_met(make_llm, store, prompt, expected):
    fake = TwoEndedConnector(store, pace=always(Pace(ends_at=20, late=1000)))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    found = set()
    while llm.has_unfinished:
        found.add(len(llm._blocks.match(llm.spec.hash.hash_blocks(prompt))))
        llm.step()
        assert llm.stats().num_loading == 0 or max(found) <= 21, "what is behind the front is not found"

    fake.store.blocks.clear()
    (again,) = llm.generate([prompt], GREEDY)

    assert again.num_local_cached_tokens == NUM_LOADED * BLOCK + NUM_NEW // BLOCK * BLOCK
    same_tokens(expected, again)


@pytest.mark.parametrize("late", [0, 1000])
def test_fail_means_blocks_that_neither_side_got(make_llm, store, prompt, expected, late):
    """A front that overtakes a stalled drive has lost nothing; a drive that fails before the front is there has."""
    options = RequestOptions(load_failure="fail")
    fake = TwoEndedConnector(store, pace=always(Pace(lambda: 2, NUM_LOADED - 7, late)))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, options=options, request_id="r")

    output = run_to_end(llm)["r"]

    if late:
        same_tokens(expected, output)
    else:
        assert output.finish_reason is FinishReason.ERROR
        assert "did not come from the store" in output.error


def test_a_request_that_fails_in_the_step_that_computes_its_front_ends_there(make_llm, store, prompt, expected):
    fake = TwoEndedConnector(store, pace=always(Pace(lambda: 1, 25, 1)))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, options=RequestOptions(load_failure="fail"), request_id="r")

    output = run_to_end(llm)["r"]

    assert output.finish_reason is FinishReason.ERROR
    assert llm.stats().num_free_pages == llm.stats().num_pages
    same_tokens(expected, llm.generate([prompt], GREEDY)[0])


def test_samples_share_what_was_filled(make_llm, store, prompt):
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=6, ignore_eos=True)
    wanted = make_llm(prefix_caching=False, chunk_tokens=CHUNK).generate([prompt], params)
    fake = TwoEndedConnector(store)

    outputs = connect(make_llm, fake).generate([prompt], params)

    assert fake.num_fills == 1
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]


@pytest.mark.parametrize("steps", range(1, 7))
def test_an_abort_in_mid_fill_waits_for_the_load(make_llm, store, prompt, expected, steps):
    fake = TwoEndedConnector(store)
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    for _ in range(steps):
        llm.step()

    output = llm.abort("r")

    llm.check()
    assert output.finish_reason is FinishReason.ABORT
    assert llm.is_draining == ("r" in fake._loads)
    run_to_end(llm)
    assert not fake.pending_jobs
    same_tokens(expected, llm.generate([prompt], GREEDY)[0])


STAGES = ["execute", "handle_preemptions", "start_load", "hidden", "start_save", "get_output"]


@pytest.mark.parametrize("pace", [Pace(), Pace(lambda: 2, 20, 2)], ids=["good", "fails"])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_broke_off_computes_its_front_again(
    make_llm, store, prompt, expected, monkeypatch, stage, num_steps, pace
):
    fake = TwoEndedConnector(store, pace=always(pace))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    for _ in range(num_steps):
        llm.step()
    interrupt_once(monkeypatch, llm._runner._worker, stage)

    try:
        llm.step()
    except KeyboardInterrupt:
        llm.check()
    else:
        assert (stage, num_steps) == ("hidden", 0), "the first step computes nothing"
    monkeypatch.undo()
    output = run_to_end(llm)["r"]

    same_tokens(expected, output)
    assert not fake.pending_jobs


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_paces_costs_time_never_tokens(make_llm, document, seed):
    """Few pages, so that requests are preempted and load again; two engines, so that one finds what the other saved."""
    rng = np.random.default_rng(seed)
    prompts = [document[: int(n)] + random_prompt(rng, int(m)) for n, m in rng.integers(1, 60, (8, 2))]
    wanted = make_llm(prefix_caching=False).generate(prompts, GREEDY)
    store = FakeStore()

    def pace(job) -> Pace | None:
        num_blocks = len(job.moves)
        ends_at = int(rng.integers(0, num_blocks)) if rng.random() < 0.5 else None
        bound = int(rng.integers(0, num_blocks)) if rng.random() < 0.3 else None
        speed = int(rng.integers(1, 5))
        made = Pace(lambda: int(rng.integers(0, speed + 1)), ends_at, int(rng.choice([0, 2, 50])), bound)
        return None if rng.random() < 0.2 else made

    num_fills = num_claims = 0
    for engine in range(2):
        temper = Temper(max_load_delay=4, max_save_delay=4, block_fails=0.05, load_loses_tail=0.1, seed=seed + engine)
        fake = TwoEndedConnector(store, temper, pace=pace)
        llm = connect(make_llm, fake, num_pages=60, max_batch=4)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            llm.check()
            compared = sum(same_tokens(a, b) for a, b in zip(wanted, outputs, strict=True))
            assert compared > 0.6 * sum(len(output.token_ids) for output in wanted)
            llm.reset_prefix_cache()
        num_fills += fake.num_fills
        num_claims += fake.num_claims
        assert not fake.pending_jobs
    assert num_fills > 3 < num_claims
