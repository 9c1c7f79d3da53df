"""The engine attends to loads layer by layer: the same tokens whether all layers come, or one fails, or is late, or the step
breaks off; and nothing computed from what did not come is sampled, saved, or found by others."""

import numpy as np
import pytest
from fake_connector import FakeConnector, FakeStore, Temper
from layered_connector import Course, LayeredConnector, LayeredWorker
from tiny_llama import LAYERS, random_prompt, same_tokens

from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.runner import Runner
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason

BLOCK = 4
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
NUM_LOADED = 20  # blocks of the document; what follows it in a prompt is not in the store
NUM_NEW = 26


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
    return make_llm(prefix_caching=False).generate([prompt], GREEDY)[0]


def connect(make_llm, fake, **settings):
    return make_llm(connector_factory=fake.factory, **({"layerwise": True} | settings))


def run_to_end(llm, outputs: dict | None = None) -> dict:
    outputs = {} if outputs is None else outputs
    while llm.has_unfinished or llm.is_draining:
        outputs |= {delta.request_id: delta.output for delta in llm.step() if delta.output}
        llm.check()
    return outputs


def test_the_first_step_loads_and_computes(make_llm, store, prompt, expected):
    """And what it computed is saved, to the last block."""
    fake = LayeredConnector(store)
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    chunk = 32 - NUM_LOADED * BLOCK % 32

    llm.step()

    assert (llm.stats().num_loading, llm.stats().num_running) == (0, 1)
    assert llm.stats().total.prefilled == chunk
    output = run_to_end(llm)["r"]
    assert fake.num_good == 1
    assert (output.num_fetched_tokens, output.num_prefilled_tokens) == (NUM_LOADED * BLOCK, NUM_NEW)
    same_tokens(expected, output)
    assert set(llm.spec.hash.hash_blocks([*prompt, *output.token_ids][:-1])) == set(store.blocks)


def test_loaded_by_layers_is_loaded_whole_bit_for_bit(make_llm, store, prompt):
    whole = connect(make_llm, LayeredConnector(store), layerwise=False).generate([prompt], GREEDY)[0]
    fake = LayeredConnector(store)

    output = connect(make_llm, fake).generate([prompt], GREEDY)[0]

    assert fake.num_good == 1
    assert output.token_ids == whole.token_ids
    assert output.logit_gaps == whole.logit_gaps


def test_it_is_off_when_it_is_not_wished(make_llm, store, prompt):
    fake = LayeredConnector(store)

    connect(make_llm, fake, layerwise=False).generate([prompt], GREEDY)

    assert fake.num_by_layers == 0
    assert fake.num_loaded_blocks == NUM_LOADED


def test_a_connector_without_it_is_no_worse(make_llm, store, prompt, expected):
    output = connect(make_llm, FakeConnector(store)).generate([prompt], GREEDY)[0]

    assert output.num_fetched_tokens == NUM_LOADED * BLOCK
    same_tokens(expected, output)


def test_the_tests_would_notice_a_layer_that_is_read_before_it_is_there(make_llm, store, prompt, expected, monkeypatch):
    monkeypatch.setattr(LayeredWorker, "_expect_untouched", lambda *_: None)
    fake = LayeredConnector(store)
    llm = connect(make_llm, fake)
    llm._runner._worker.wait_for_layer = lambda *_: True

    llm.add_request(prompt, GREEDY)
    with pytest.raises(AssertionError):  # what it computed is NaN, and the fake refuses to save that
        run_to_end(llm)
    monkeypatch.undo()
    fake._loads.clear()
    fake.courses.clear()
    fake._saves.clear()


@pytest.mark.parametrize("num_good", [0, 1, 13, NUM_LOADED - 1])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_load_that_fails_at_a_layer_is_recomputed_from_the_first_failed_block(
    make_llm, store, prompt, expected, layer, num_good
):
    fake = LayeredConnector(store, course=lambda _job: Course(layer, num_good))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")

    assert llm.step() == []

    assert llm.stats().total.prefilled == 0, "what was computed does not count"
    llm.check()
    output = run_to_end(llm)["r"]
    assert fake.num_missed == 1
    assert output.num_fetched_tokens == num_good * BLOCK
    assert output.num_prefilled_tokens == len(prompt) - num_good * BLOCK
    same_tokens(expected, output)
    assert set(llm.spec.hash.hash_blocks([*prompt, *output.token_ids][:-1])) == set(store.blocks)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_load_that_is_late_is_waited_for_as_any_other(make_llm, store, prompt, expected, layer):
    fake = LayeredConnector(store, Temper(max_load_delay=5), course=lambda _job: Course(layer))
    llm = connect(make_llm, fake)
    llm.add_request([9] * 3, GREEDY, request_id="keeps the engine from waiting")
    llm.add_request(prompt, GREEDY, request_id="r")

    while fake.num_missed == 0:
        llm.step()
    assert llm.stats().num_loading == 1
    assert llm.stats().total.prefilled == 3

    output = run_to_end(llm)["r"]
    assert (output.num_fetched_tokens, output.num_prefilled_tokens) == (NUM_LOADED * BLOCK, NUM_NEW)
    same_tokens(expected, output)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_request_that_wishes_to_fail_fails_without_a_token(make_llm, store, prompt, layer):
    fake = LayeredConnector(store, course=lambda _job: Course(layer, NUM_LOADED - 1))
    llm = connect(make_llm, fake)
    fails = RequestOptions(load_failure="fail")

    output = llm.generate([prompt], GREEDY, options=fails)[0]

    assert output.finish_reason is FinishReason.ERROR
    assert output.error == f"1 of {NUM_LOADED} blocks did not come from the store"
    assert output.token_ids == ()
    assert llm.generate([prompt[:30]], GREEDY)[0].finish_reason is FinishReason.LENGTH
    llm.check()


def test_a_request_that_wishes_to_fail_goes_on_after_a_good_load(make_llm, store, prompt, expected):
    fails = RequestOptions(load_failure="fail")

    output = connect(make_llm, LayeredConnector(store)).generate([prompt], GREEDY, options=fails)[0]

    same_tokens(expected, output)
    assert output.num_fetched_tokens == NUM_LOADED * BLOCK


@pytest.mark.parametrize("course", [Course(), Course(2, 3), Course(1)], ids=["good", "fails", "late"])
def test_samples_fork_once_the_prompt_is_really_computed(make_llm, store, document, course):
    short = [*document, 5, 6, 7]  # one chunk behind the load
    two = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=4, ignore_eos=True)
    whole = make_llm(prefix_caching=False).generate([short], two)
    fake = LayeredConnector(store, course=lambda _job: course)
    llm = connect(make_llm, fake)

    outputs = llm.generate([short], two)

    assert fake.num_by_layers == 1
    assert [output.token_ids for output in outputs] == [output.token_ids for output in whole]
    llm.check()


@pytest.mark.parametrize("length", [NUM_LOADED * BLOCK, NUM_LOADED * BLOCK + 1])
def test_a_decode_does_not_wait_within_its_step(make_llm, store, document, length):
    """It would hold up all others; with a token less the last block is not loaded, and a chunk follows."""
    fake = LayeredConnector(store)

    (output,) = connect(make_llm, fake).generate([[*document, 5][:length]], GREEDY)

    assert output.num_fetched_tokens == (length - 1) // BLOCK * BLOCK
    assert fake.num_by_layers == (length == NUM_LOADED * BLOCK)


def test_a_step_without_room_for_the_chunk_loads_as_ever(make_llm, store, prompt, expected):
    fake = LayeredConnector(store)
    llm = connect(make_llm, fake)
    llm.add_request(random_prompt(np.random.default_rng(8), 40), GREEDY, request_id="fills the step")
    llm.add_request(prompt, GREEDY, request_id="r")

    output = run_to_end(llm)["r"]

    assert fake.num_by_layers == 0
    assert output.num_fetched_tokens == NUM_LOADED * BLOCK
    same_tokens(expected, output)


def test_others_decode_in_the_step_of_a_void_share(make_llm, store, prompt, expected):
    fake = LayeredConnector(store, Temper(max_load_delay=4), course=lambda _job: Course(1))
    llm = connect(make_llm, fake)
    other = [9] * 3
    alone = make_llm(prefix_caching=False).generate([other], GREEDY)[0]
    llm.add_request(other, GREEDY, request_id="other")
    llm.step()
    llm.add_request(prompt, GREEDY, request_id="r")

    (delta,) = llm.step()

    assert (delta.request_id, fake.num_missed) == ("other", 1)
    outputs = run_to_end(llm, {})
    same_tokens(alone, outputs["other"])
    same_tokens(expected, outputs["r"])


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_abort_in_mid_load_waits_for_the_load(make_llm, store, prompt, expected, steps):
    fake = LayeredConnector(store, Temper(max_load_delay=6, seed=steps), course=lambda _job: Course(2))
    llm = connect(make_llm, fake)
    llm.add_request([9] * 3, GREEDY, request_id="keeps the engine from waiting")
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


def interrupt_once(monkeypatch, worker, stage: str) -> None:
    """The next step breaks off where it comes to `stage`."""
    owner = {"execute": Runner, "hidden": Transformer}.get(stage, worker)
    stage, _, layer = stage.partition(" ")
    real = getattr(owner, stage)

    def break_off(*args, **kwargs):
        if layer and args[1] != int(layer):
            return real(*args, **kwargs)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, stage, break_off)


STAGES = [
    "execute",
    "handle_preemptions",
    "start_load",
    "begin_saves",
    "hidden",
    *[f"wait_for_layer {layer}" for layer in range(LAYERS)],
    "start_save",
    "get_output",
]


@pytest.mark.parametrize("course", [Course(), Course(2, 3), Course(1)], ids=["good", "fails", "late"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_broke_off_leaves_the_request_waiting_for_its_load(
    make_llm, store, prompt, expected, monkeypatch, stage, course
):
    fake = LayeredConnector(store, Temper(max_load_delay=3, max_save_delay=3), course=lambda _job: course)
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    interrupt_once(monkeypatch, llm._runner._worker, stage)

    try:
        llm.step()
    except KeyboardInterrupt:
        llm.check()
    else:
        assert fake.num_missed, "the layer before it was missing, so this one was not asked for"
    monkeypatch.undo()
    output = run_to_end(llm)["r"]

    same_tokens(expected, output)
    assert not fake.pending_jobs


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_courses_costs_time_never_tokens(make_llm, document, seed):
    """Few pages, so that requests are preempted and load again; two engines, so that one finds what the other saved."""
    rng = np.random.default_rng(seed)
    prompts = [document[: int(n)] + random_prompt(rng, int(m)) for n, m in rng.integers(1, 60, (8, 2))]
    wanted = make_llm(prefix_caching=False).generate(prompts, GREEDY)
    store = FakeStore()

    def course(job) -> Course | None:
        layer, num_good = int(rng.integers(0, LAYERS)), int(rng.integers(0, len(job.moves)))
        return [None, Course(), Course(), Course(layer, num_good), Course(layer)][rng.integers(0, 5)]

    num_by_layers = 0
    for engine in range(2):
        temper = Temper(max_load_delay=4, max_save_delay=4, block_fails=0.05, load_loses_tail=0.1, seed=seed + engine)
        fake = LayeredConnector(store, temper, course=course)
        llm = connect(make_llm, fake, num_pages=60, max_batch=4)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            llm.check()
            compared = sum(same_tokens(a, b) for a, b in zip(wanted, outputs, strict=True))
            assert compared > 0.6 * sum(len(output.token_ids) for output in wanted)
            llm.reset_prefix_cache()
        num_by_layers += fake.num_by_layers
        assert not fake.pending_jobs
    assert num_by_layers > 3


# --- saves -----------------------------------------------------------------------------------------------------------------


def test_what_is_saved_by_layers_is_what_is_saved_whole(make_llm, prompt):
    whole, by_layers = FakeConnector(FakeStore()), LayeredConnector(FakeStore())
    (expected,) = make_llm(connector_factory=whole.factory).generate([prompt], GREEDY)

    (output,) = connect(make_llm, by_layers).generate([prompt], GREEDY)

    assert output.token_ids == expected.token_ids
    assert by_layers.num_begun_saves >= 4, "of chunks and of decodes"
    assert whole.store.blocks.keys() == by_layers.store.blocks.keys()
    for block_hash, content in whole.store.blocks.items():
        assert np.array_equal(content, by_layers.store.blocks[block_hash])


SAVE_STAGES = [
    "begin_saves",
    "hidden",
    *[f"layer_computed {layer}" for layer in range(LAYERS)],
    "start_save",
    "get_output",
]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_a_step_that_broke_off_drops_the_saves_that_had_begun(
    make_llm, prompt, expected, monkeypatch, stage, num_steps
):
    """Of a first chunk, of a later one, of the last one; they are computed and saved again."""
    fake = LayeredConnector(FakeStore(), Temper(max_save_delay=3))
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    for _ in range(num_steps):
        llm.step()
    interrupt_once(monkeypatch, llm._runner._worker, stage)

    with pytest.raises(KeyboardInterrupt):
        llm.step()
    llm.check()
    output = run_to_end(llm)["r"]

    assert fake.num_dropped_saves == (stage not in {"begin_saves", "get_output"})
    assert not fake.pending_jobs
    same_tokens(expected, output)
    assert set(llm.spec.hash.hash_blocks([*prompt, *output.token_ids][:-1])) == set(fake.store.blocks)


def test_an_abort_after_a_step_that_broke_off_waits_for_dropped_saves(make_llm, prompt, monkeypatch):
    fake = LayeredConnector(FakeStore())
    llm = connect(make_llm, fake)
    llm.add_request(prompt, GREEDY, request_id="r")
    interrupt_once(monkeypatch, llm._runner._worker, "layer_computed 1")
    with pytest.raises(KeyboardInterrupt):
        llm.step()

    llm.abort("r")

    assert llm.is_draining
    llm.check()
    run_to_end(llm)
    assert not fake.store.blocks
