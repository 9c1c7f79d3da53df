"""The engine with a store, kind and unkind: loaded is computed, a failed load is recomputed, no page is lost."""

import numpy as np
import pytest
from fake_connector import FakeConnector, FakeStore, Temper
from tiny_llama import random_prompt, same_tokens

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine import llm as llm_module
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.runner import Runner
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.protocol import WorkerOutput

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
UNKIND = Temper(max_load_delay=6, max_save_delay=6, block_fails=0.1, load_loses_tail=0.3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(21)
    system, document = random_prompt(rng, 40), random_prompt(rng, 90)
    tails = [random_prompt(rng, n) for n in (1, 3, 4, 17, 30, 5)]
    return [system + t for t in tails[:3]] + [system + document + t for t in tails[3:]] + [random_prompt(rng, 2)]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    with LLM(tiny.path, num_pages=512, block_tokens=4, chunk_tokens=32, num_threads=1, prefix_caching=False) as llm:
        return llm.generate(prompts, GREEDY)


@pytest.fixture
def store_after_one_engine(make_llm, prompts) -> FakeStore:
    store = FakeStore()
    make_llm(connector_factory=FakeConnector(store).factory).generate(prompts, GREEDY)
    return store


def assert_all_same(expected, outputs) -> None:
    compared = sum(same_tokens(a, b) for a, b in zip(expected, outputs, strict=True))
    assert compared > 0.6 * sum(len(output.token_ids) for output in expected)


def test_a_second_engine_loads_what_the_first_computed(make_llm, prompts, expected, store_after_one_engine):
    fake = FakeConnector(store_after_one_engine)
    llm = make_llm(connector_factory=fake.factory)

    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]

    assert_all_same(expected, outputs)
    for output in outputs:
        loadable = (output.num_prompt_tokens - 1) // 4 * 4
        assert output.num_fetched_tokens + output.num_local_cached_tokens == loadable
        assert output.num_prefilled_tokens == output.num_prompt_tokens - loadable
    assert outputs[0].num_fetched_tokens == 40
    assert outputs[4].num_fetched_tokens > 0


def test_loaded_is_locally_cached_bit_for_bit(make_llm, prompts, store_after_one_engine):
    """The same pages by another road: not even the last bits of the logits differ."""
    local = make_llm()
    local.generate(prompts[3:4], GREEDY)
    cached = local.generate(prompts[3:4], GREEDY)[0]
    loaded = make_llm(connector_factory=FakeConnector(_saved_by(make_llm, prompts[3])).factory)

    output = loaded.generate(prompts[3:4], GREEDY)[0]

    assert output.num_fetched_tokens == cached.num_local_cached_tokens > 100
    assert output.token_ids == cached.token_ids
    assert output.logit_gaps == cached.logit_gaps


def _saved_by(make_llm, prompt) -> FakeStore:
    store = FakeStore()
    make_llm(connector_factory=FakeConnector(store).factory).generate([prompt], GREEDY)
    return store


def test_generated_blocks_are_saved_like_prompt_blocks(make_llm, prompts):
    fake = FakeConnector(FakeStore())
    llm = make_llm(connector_factory=fake.factory)

    output = llm.generate([prompts[0]], GREEDY)[0]

    tokens = [*prompts[0], *output.token_ids]
    hashes = llm.spec.hash.hash_blocks(tokens[:-1])  # the last token was never computed
    assert set(fake.store.blocks) == set(hashes)


def test_the_tests_would_notice_a_wrong_page(make_llm, prompts, expected, store_after_one_engine):
    store_after_one_engine.compares = False
    fake = FakeConnector(store_after_one_engine, Temper(flip_a_bit=True))
    llm = make_llm(connector_factory=fake.factory)

    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts[:6]]

    assert fake.num_loaded_blocks > 10
    with pytest.raises(AssertionError):
        assert_all_same(expected[:6], outputs)


@pytest.mark.parametrize("seed", range(6))
def test_an_unkind_store_costs_time_never_tokens(make_llm, prompts, expected, seed):
    """Two engines on one store, few pages: loads fail and dawdle, saves linger, requests are preempted."""
    store = FakeStore()
    for engine in range(2):
        temper = Temper(**{**_fields(UNKIND), "seed": 10 * seed + engine})
        fake = FakeConnector(store, temper)
        llm = make_llm(connector_factory=fake.factory, num_pages=70, max_batch=4)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            llm.check()
            assert_all_same(expected, outputs)
            llm.reset_prefix_cache()
        llm.close()
        assert fake.closed == ["worker", "scheduler"]
        if engine:
            assert fake.num_failed_blocks > 0
            assert fake.num_loaded_blocks > 0


def _fields(temper: Temper) -> dict:
    return {name: getattr(temper, name) for name in temper.__dataclass_fields__}


def test_preemption_happens_while_saves_are_under_way(make_llm, prompts, expected):
    fake = FakeConnector(FakeStore(), Temper(max_save_delay=30))
    llm = make_llm(connector_factory=fake.factory, num_pages=50)

    outputs = llm.generate(prompts, GREEDY)

    assert fake.preempted
    assert_all_same(expected, outputs)


def test_a_load_that_fails_is_recomputed_from_the_first_failed_block(
    make_llm, prompts, expected, store_after_one_engine
):
    fake = FakeConnector(store_after_one_engine, Temper(block_fails=0.2, seed=5))
    llm = make_llm(connector_factory=fake.factory)

    output = llm.generate(prompts[4:5], GREEDY)[0]

    assert 0 < output.num_fetched_tokens < fake.num_loaded_blocks * 4
    assert output.num_fetched_tokens + output.num_prefilled_tokens == output.num_prompt_tokens
    same_tokens(expected[4], output)


@pytest.mark.parametrize("steps", range(9))
def test_an_abort_at_any_step_waits_for_its_loads_and_saves(make_llm, prompts, expected, store_after_one_engine, steps):
    fake = FakeConnector(
        store_after_one_engine, Temper(max_load_delay=3, max_save_delay=3, block_fails=0.3, seed=steps)
    )
    llm = make_llm(connector_factory=fake.factory, num_pages=70)
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts[:5]]
    for _ in range(steps):
        llm.step()
        llm.check()

    for request_id in ids:
        output = llm.abort(request_id)
        llm.check()
        assert output is None or output.finish_reason is FinishReason.ABORT

    assert llm.drain(5.0)
    llm.check()
    assert_all_same(expected, llm.generate(prompts, GREEDY))


def test_an_id_is_in_use_until_its_pages_are_let_go(make_llm, prompts, store_after_one_engine):
    fake = FakeConnector(store_after_one_engine, Temper(max_load_delay=9, seed=3))
    llm = make_llm(connector_factory=fake.factory)
    llm.add_request([9] * 3, GREEDY, request_id="keeps the engine from waiting")
    llm.add_request(prompts[4], GREEDY, request_id="x")
    llm.step()
    assert llm.abort("x").num_fetched_tokens == 0
    assert llm.is_draining

    with pytest.raises(ConfigError, match="'x' is in use"):
        llm.add_request(prompts[4], GREEDY, request_id="x")

    while llm.is_draining:
        llm.step()
    llm.add_request(prompts[4], GREEDY, request_id="x")
    llm.abort("x")


def test_other_requests_run_while_one_waits_for_its_load(make_llm, prompts, store_after_one_engine):
    fake = FakeConnector(store_after_one_engine, Temper(max_load_delay=200, seed=1))
    llm = make_llm(connector_factory=fake.factory)
    llm.add_request(prompts[4], GREEDY, request_id="loads")
    llm.add_request([9] * 3, GREEDY, request_id="computes")

    finished = []
    while llm.has_unfinished:
        finished += [delta.request_id for delta in llm.step() if delta.output]

    assert finished == ["computes", "loads"]


STAGES = ["execute", "handle_preemptions", "start_load", "hidden", "start_save", "get_output"]


def interrupt_once(monkeypatch, connector, stage: str, error: BaseException) -> None:
    """The next step breaks off where it comes to `stage`."""
    owner = {"execute": Runner, "hidden": Transformer}.get(stage, connector.worker)

    def break_off(*_args, **_kwargs):
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(owner, stage, break_off)


@pytest.fixture
def two_prompts(prompts) -> list[list[int]]:
    """One that `interruptible` finds in its store, one that shares no block with it."""
    return [prompts[0], prompts[3][40:]]


@pytest.fixture
def interruptible(make_llm, prompts):
    """An engine whose first step loads one of two_prompts, and computes the other and saves it; and its connector."""
    connectors = []
    fake = FakeConnector(_saved_by(make_llm, prompts[0]), Temper(max_load_delay=3, max_save_delay=3))
    llm = make_llm(connector_factory=lambda spec: connectors.append(fake.factory(spec)) or connectors[0])
    return llm, fake, connectors[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_a_generate_broken_off_loses_no_page_and_the_next_one_runs(
    interruptible, monkeypatch, prompts, two_prompts, expected, stage, error
):
    llm, fake, connector = interruptible
    interrupt_once(monkeypatch, connector, stage, error)

    with pytest.raises(type(error)):
        llm.generate(two_prompts, GREEDY)

    llm.check()
    assert not llm.has_unfinished
    assert llm.drain(5.0)
    llm.step()
    assert not fake.pending_jobs
    assert llm._blocks.num_free == 128
    assert_all_same(expected, llm.generate(prompts, GREEDY))
    llm.check()


@pytest.mark.parametrize("stage", STAGES)
def test_requests_go_on_after_a_step_that_broke_off(interruptible, make_llm, monkeypatch, two_prompts, stage):
    llm, fake, connector = interruptible
    expected = make_llm(prefix_caching=False).generate(two_prompts, GREEDY)
    ids = [llm.add_request(prompt, GREEDY) for prompt in two_prompts]
    interrupt_once(monkeypatch, connector, stage, KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        llm.step()
    outputs = {}
    while llm.has_unfinished or llm.is_draining:
        outputs |= {delta.request_id: delta.output for delta in llm.step() if delta.output}
        llm.check()

    assert_all_same(expected, [outputs[request_id] for request_id in ids])
    assert not fake.pending_jobs


def test_generate_returns_though_a_save_never_ends(interruptible, monkeypatch, two_prompts):
    llm, fake, connector = interruptible
    with monkeypatch.context() as patch:
        patch.setattr(llm_module, "DRAIN_DEADLINE_S", 0.2)
        patch.setattr(connector.worker, "get_output", lambda **_: WorkerOutput())

        assert llm.generate(two_prompts[1:], GREEDY)

        assert llm.is_draining
        assert fake.pending_jobs
    assert llm.drain(5.0)
