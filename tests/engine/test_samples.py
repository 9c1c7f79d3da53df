"""n samples of one prompt: one prefill, shared pages, a copy where two would write; each as if it were alone."""

import numpy as np
import pytest
from fake_connector import FakeConnector, FakeStore, Temper
from test_engine_scheduler import BLOCK, Driver, shares
from tiny_llama import random_prompt

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine import runner
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SampledToken, SamplingParams, sample
from kvstore.engine_connector.engine.sequence import FinishReason, Status
from kvstore.engine_connector.protocol import WorkerOutput

WARM = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 12}


def tables(driver: Driver) -> list[list[int]]:
    return [sequence.block_ids for sequence in driver.scheduler._running]


def test_samples_share_all_pages_but_the_open_one_which_is_copied_for_all_but_the_first():
    driver = Driver()
    driver.add(10, n=3)

    driver.step()

    first, second, third = tables(driver)
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert sorted(driver.copies) == sorted([(first[2], second[2]), (first[2], third[2])])
    assert shares(driver.step()) == [("r0", 10, 11), ("r0#1", 10, 11), ("r0#2", 10, 11)]


def test_nothing_is_copied_when_the_prompt_fills_its_last_page():
    driver = Driver()
    driver.add(8, n=2)

    driver.step(), driver.step()

    assert driver.copies == []
    first, second = tables(driver)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_a_sample_that_ends_with_its_first_token_needs_no_copy():
    driver = Driver()
    driver.add(10, n=3, max_tokens=1)

    driver.step()

    assert driver.copies == []
    assert not driver.scheduler.has_unfinished
    assert driver.scheduler.num_finished[FinishReason.LENGTH] == 3


def test_a_request_waits_until_all_of_its_samples_fit_in_the_batch():
    driver = Driver(max_batch=3)
    driver.add(5, max_tokens=2)
    driver.step()
    driver.add(5, n=3, max_tokens=2)

    assert shares(driver.step()) == [("r0", 5, 6)]
    assert shares(driver.step()) == [("r1", 0, 5)]
    assert len(shares(driver.step())) == 3


def test_samples_without_a_page_for_the_copy_resume_later():
    driver = Driver(num_pages=4)
    driver.add(10, n=3, max_tokens=4)

    driver.step()

    assert [len(driver.copies), driver.scheduler.num_running, driver.scheduler.num_waiting] == [1, 2, 1]
    while driver.scheduler.has_unfinished:
        driver.step()
    assert driver.scheduler.num_finished[FinishReason.LENGTH] == 3
    assert driver.scheduler.total.generated == 12


def test_the_ids_of_all_samples_are_taken_from_the_start():
    driver = Driver()
    sequence = driver.add(5, n=3)

    assert driver.scheduler.in_use(["r0#2"])
    driver.scheduler.abort(sequence)
    assert not driver.scheduler.in_use(["r0", "r0#1", "r0#2"])


def test_one_sample_may_be_aborted_while_its_siblings_go_on():
    driver = Driver()
    driver.add(10, n=3, max_tokens=5)
    step = driver.scheduler.schedule()
    first, second, third = driver.scheduler.update(step, [SampledToken(7, 1.0)] * 3, WorkerOutput())

    driver.scheduler.abort(first)
    driver.scheduler.check()
    driver.step()

    assert first.block_ids == []
    assert second.status is third.status is Status.RUNNING
    while driver.scheduler.has_unfinished:
        driver.step()
    assert len(second.output_ids) == len(third.output_ids) == 5


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_prompt(np.random.default_rng(5), 5 * BLOCK + 2)


@pytest.fixture(scope="module")
def expected(tiny, prompt):
    """All samples in an engine with room for everything."""
    with LLM(tiny.path, num_pages=256, block_tokens=4, chunk_tokens=32, num_threads=1) as llm:
        return llm.generate([prompt], SamplingParams(n=4, seed=3, **WARM))


def test_a_sample_is_what_it_would_be_alone(make_llm, prompt, expected):
    """Bit for bit: the first is the request with n = 1, the others go their own ways."""
    llm = make_llm()

    (alone,) = llm.generate([prompt], SamplingParams(seed=3, **WARM))
    (fewer_0, fewer_1) = make_llm().generate([prompt], SamplingParams(n=2, seed=3, **WARM))

    assert alone.token_ids == fewer_0.token_ids == expected[0].token_ids
    assert fewer_1.token_ids == expected[1].token_ids
    assert len({output.token_ids for output in expected}) == 4
    assert [output.index for output in expected] == [0, 1, 2, 3]


def test_greedy_samples_are_all_the_same(make_llm, prompt):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (alone,) = make_llm().generate([prompt], params)

    outputs = make_llm().generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True, n=4))

    assert [o.token_ids for o in outputs] == [alone.token_ids] * 4
    assert [o.logit_gaps for o in outputs] == [alone.logit_gaps] * 4


def test_the_prompt_is_computed_once(make_llm, prompt):
    llm = make_llm()

    outputs = llm.generate([prompt], SamplingParams(n=4, seed=3, **WARM))

    assert [o.num_prefilled_tokens for o in outputs] == [len(prompt), 0, 0, 0]
    assert [o.num_local_cached_tokens for o in outputs] == [0] + [len(prompt)] * 3
    assert llm.stats().total.prefilled == len(prompt)


def test_outputs_come_in_order_of_prompts_and_samples(make_llm, prompt, expected):
    outputs = make_llm().generate([prompt[:9], prompt], SamplingParams(n=4, seed=3, **WARM))

    assert [(o.num_prompt_tokens, o.index) for o in outputs] == [(n, i) for n in (9, len(prompt)) for i in range(4)]
    assert [o.token_ids for o in outputs[4:]] == [o.token_ids for o in expected]


def test_few_pages_change_nothing(make_llm, prompt, expected):
    """10 pages: the prompt has 6, four samples would need 20."""
    llm = make_llm(num_pages=10)

    outputs = llm.generate([prompt], SamplingParams(n=4, seed=3, **WARM))

    assert sum(o.num_preemptions for o in outputs) > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_a_loaded_prompt_forks_too(make_llm, prompt, expected):
    store = FakeStore()
    make_llm(connector_factory=FakeConnector(store).factory).generate([prompt[:-1]], SamplingParams(max_tokens=4))
    fake = FakeConnector(store, Temper(max_load_delay=3, max_save_delay=9))
    llm = make_llm(connector_factory=fake.factory, num_pages=14)

    outputs = llm.generate([prompt], SamplingParams(n=4, seed=3, **WARM))

    assert outputs[0].num_fetched_tokens == 20
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_a_stream_tells_the_samples_apart(make_llm, prompt, expected):
    deltas = list(make_llm().stream(prompt, SamplingParams(n=4, seed=3, **WARM)))

    for index, output in enumerate(expected):
        mine = [delta for delta in deltas if delta.index == index]
        assert tuple(delta.token_id for delta in mine) == output.token_ids
        assert "".join(delta.text for delta in mine) == output.text
        assert [delta.output is None for delta in mine] == [True] * 11 + [False]


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_ends_all_samples(make_llm, prompt, steps):
    fake = FakeConnector(FakeStore(), Temper(max_save_delay=5))
    llm = make_llm(connector_factory=fake.factory)
    llm.add_request(prompt, SamplingParams(n=3, **WARM), request_id="x")
    for _ in range(steps):
        llm.step()

    output = llm.abort("x")

    assert (output.index, output.finish_reason) == (0, FinishReason.ABORT)
    assert not llm.has_unfinished
    assert llm.step() == []
    llm.check()
    assert llm.drain(5.0)
    assert llm.stats().num_free_pages == 128
    assert llm.stats().num_finished[FinishReason.ABORT] == 3
    assert llm.abort("x") is None


def test_more_samples_than_the_batch_holds_are_refused(make_llm, prompt):
    with pytest.raises(ConfigError, match="n: 5 is out of range; use 1 to max_batch 4"):
        make_llm(max_batch=4).generate([prompt], SamplingParams(n=5))


def test_each_sample_draws_from_its_own_numbers_at_every_position(make_llm, monkeypatch, prompt):
    drawn = []

    def note(logits, specs):
        drawn.append([(spec.position, spec.sample) for spec in specs])
        return sample(logits, specs)

    monkeypatch.setattr(runner, "sample", note)
    make_llm().generate([prompt], SamplingParams(n=3, temperature=1.0, max_tokens=3, ignore_eos=True))

    assert drawn == [[(position, index) for index in range(3)] for position in range(3)]
