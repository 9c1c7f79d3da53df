"""The engine as a whole, without a store: the same tokens whatever the route, errors before work, nothing left behind."""

import numpy as np
import pytest
from tiny_llama import TOKENS, dense_logits, random_prompt, random_tensors, same_tokens, write_gguf

from kvstore.core.clock import ManualClock
from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    shared = random_prompt(rng, 60)
    return [shared + random_prompt(rng, n) for n in (1, 4, 9, 40)] + [
        random_prompt(rng, n) for n in (1, 2, 31, 32, 33, 100)
    ]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    """Each prompt by itself, in an engine that never saw another, in one chunk."""
    outputs = []
    for prompt in prompts:
        with LLM(tiny.path, num_pages=64, chunk_tokens=512, num_threads=1) as llm:
            outputs += llm.generate([prompt], GREEDY)
    return outputs


def assert_all_same(expected, outputs) -> None:
    compared = sum(same_tokens(a, b) for a, b in zip(expected, outputs, strict=True))
    assert compared > 0.6 * sum(len(output.token_ids) for output in expected)


def test_greedy_tokens_are_the_dense_models(tiny, prompts, expected):
    for prompt, output in zip(prompts[3:6], expected[3:6], strict=True):
        tokens = [*prompt, *output.token_ids]
        logits = dense_logits(tiny.tensors, tokens)[len(prompt) - 1 : -1]
        best = np.sort(logits, axis=-1)[:, -2:]
        certain = best[:, 1] - best[:, 0] > 0.05
        assert certain.sum() > 12
        assert (logits.argmax(-1) == output.token_ids)[certain].all()
        assert np.abs((best[:, 1] - best[:, 0]) - output.logit_gaps).max() < 0.05


def test_chunked_is_unchunked(make_llm, prompts, expected):
    llm = make_llm(prefix_caching=False)

    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]

    assert_all_same(expected, outputs)
    assert all(output.num_prefilled_tokens == output.num_prompt_tokens for output in outputs)


def test_batched_is_alone_bit_for_bit(make_llm, prompts):
    alone = make_llm(prefix_caching=False, num_pages=256)
    outputs = [alone.generate([prompt], GREEDY)[0] for prompt in prompts]

    together = make_llm(prefix_caching=False, num_pages=256).generate(prompts, GREEDY)

    assert sum(output.num_preemptions for output in together) == 0
    assert [o.token_ids for o in together] == [o.token_ids for o in outputs]
    assert [o.logit_gaps for o in together] == [o.logit_gaps for o in outputs]


def test_prefix_cached_is_computed(make_llm, prompts, expected):
    llm = make_llm(num_pages=512)
    llm.generate(prompts, GREEDY)

    again = llm.generate(prompts, GREEDY)

    assert_all_same(expected, again)
    for output in again:
        assert output.num_local_cached_tokens == (output.num_prompt_tokens - 1) // 4 * 4
        assert output.num_prefilled_tokens == output.num_prompt_tokens - output.num_local_cached_tokens
        assert output.num_fetched_tokens == 0


def test_preempted_is_undisturbed(make_llm, prompts, expected):
    llm = make_llm(num_pages=40)

    outputs = llm.generate(prompts, GREEDY)

    assert sum(output.num_preemptions for output in outputs) > 3
    assert_all_same(expected, outputs)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
def test_pages_of_another_type_run_and_name_themselves_in_the_spec(make_llm, prompts, kv_dtype):
    llm = make_llm(kv_dtype=kv_dtype)

    output = llm.generate([prompts[0]], GREEDY)[0]

    assert len(output.token_ids) == 24
    assert llm.spec.dtype == kv_dtype


def test_requests_that_come_and_go_while_others_run_change_nothing(make_llm, prompts, expected):
    llm = make_llm(max_batch=3)
    pending = dict(enumerate(prompts))
    outputs = {}
    step = 0
    while pending or llm.has_unfinished:
        if pending and step % 3 == 0:
            index = min(pending)
            llm.add_request(pending.pop(index), GREEDY, request_id=str(index))
            llm.add_request(prompts[0][: 50 + step], GREEDY, request_id=f"noise{step}")
        outputs |= {int(d.request_id): d.output for d in llm.step() if d.output and d.request_id.isdigit()}
        if step % 4 == 2:
            llm.abort(f"noise{step - 2}")
        llm.check()
        step += 1

    assert_all_same(expected, [outputs[index] for index in range(len(prompts))])


def test_a_stream_is_the_output_in_pieces(make_llm, prompts, expected):
    llm = make_llm()

    deltas = list(llm.stream(prompts[2], GREEDY))

    output = deltas[-1].output
    assert [d.output for d in deltas[:-1]] == [None] * 23
    assert tuple(d.token_id for d in deltas) == output.token_ids
    assert "".join(d.text for d in deltas) == output.text == llm.tokenizer.decode(output.token_ids)
    same_tokens(expected[2], output)


def test_streams_interleave_with_each_other_and_with_steps(make_llm, prompts, expected):
    llm = make_llm()
    llm.add_request(prompts[4], GREEDY, request_id="own")
    left, right = llm.stream(prompts[5], GREEDY), llm.stream(prompts[6], GREEDY)
    outputs = {}
    for a, b in zip(left, right, strict=True):
        outputs |= {5: a.output, 6: b.output}
    own = llm.step()
    assert llm.has_unfinished is False

    assert_all_same(expected[4:7], [own[-1].output, outputs[5], outputs[6]])


def test_a_stream_given_up_early_ends_its_request(make_llm, prompts):
    llm = make_llm()
    stream = llm.stream(prompts[2], GREEDY)
    next(stream)

    stream.close()

    assert not llm.has_unfinished
    llm.check()


def test_an_aborted_request_returns_what_it_has(make_llm, prompts):
    llm = make_llm()
    request_id = llm.add_request(prompts[5], GREEDY)
    tokens = [delta.token_id for _ in range(4) for delta in llm.step()]

    output = llm.abort(request_id)

    assert output.finish_reason is FinishReason.ABORT
    assert list(output.token_ids) == tokens
    assert llm.abort(request_id) is None
    llm.check()


def test_sampling_depends_on_the_seed_alone(make_llm, prompts):
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=16) for seed in (1, 2, 1)]
    llm = make_llm(prefix_caching=False)

    one, two, again = llm.generate([prompts[3]] * 3, params)

    assert one.token_ids == again.token_ids != two.token_ids
    assert llm.generate([prompts[3]], params[1])[0].token_ids == two.token_ids


def test_text_is_encoded_and_a_stop_token_ends_it(make_llm):
    llm = make_llm()

    output = llm.generate(["the the 12"], SamplingParams(max_tokens=400))[0]

    assert output.num_prompt_tokens == 5
    assert (output.finish_reason is FinishReason.STOP) == (output.token_ids[-1] in llm.tokenizer.stop_ids)


def test_ttft_runs_from_request_in_to_first_token_out(make_llm, prompts):
    clock = ManualClock()
    llm = make_llm(clock=clock)
    llm.add_request(prompts[9], GREEDY)  # 100 tokens: four chunks
    outputs = []
    while llm.has_unfinished:
        clock.advance(1.0)
        outputs += [delta.output for delta in llm.step() if delta.output]

    assert outputs[0].ttft_s == 4.0


def test_the_spec_identifies_weights_positions_and_hashing(make_llm, tmp_path):
    llm = make_llm(hash_seed="salt")
    other = LLM(write_gguf(tmp_path / "tiny.gguf", random_tensors(1)), num_threads=1)

    assert (llm.spec.num_layers, llm.spec.num_kv_heads, llm.spec.head_dim, llm.spec.dtype) == (4, 2, 16, "float16")
    assert llm.spec.hash.seed == "salt"
    assert llm.spec.hash.block_tokens == llm.spec.block_tokens == 4
    assert llm.spec.weights != other.spec.weights
    other.close()


def test_a_forgotten_prefix_is_computed_again(make_llm, prompts):
    llm = make_llm()
    llm.generate([prompts[3]], GREEDY)

    llm.reset_prefix_cache()

    assert llm.generate([prompts[3]], GREEDY)[0].num_local_cached_tokens == 0
    llm.check()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: empty"),
        ("", "prompt: empty"),
        ([5] * 513, "prompt: 513 tokens are more than the 512 that all 128 pages hold"),
        ([5, len(TOKENS)], f"prompt: token id {len(TOKENS)} is out of range; use 0 to {len(TOKENS) - 1}"),
        ([-1], "prompt: token id -1 is out of range"),
        ([5, "6"], "prompt: '6' at 1 is no token id; use whole numbers"),
        ([5, 6.0], "prompt: 6.0 at 1 is no token id; use whole numbers"),
        ([True], "prompt: True at 0 is no token id; use whole numbers"),
        (5, "prompt: 5 is no list of token ids; use whole numbers"),
        (b"text", "prompt: b'text' is no list of token ids; use whole numbers"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_served(make_llm, prompts, prompt, message):
    llm = make_llm()
    for call in (llm.add_request, llm.stream, lambda p: llm.generate([prompts[0], p])):
        with pytest.raises(ConfigError, match=message) as caught:
            call(prompt)
        assert caught.value.fields["field"] == "prompt"

    assert not llm.has_unfinished
    assert len(llm.generate([prompts[0]], GREEDY)[0].token_ids) == 24


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"num_pages": 512}, "the model's context of 1024"), ({"max_model_len": 100}, "max_model_len 100")],
)
def test_a_prompt_longer_than_the_limit_names_both_numbers(make_llm, settings, limit):
    llm = make_llm(**settings)

    with pytest.raises(ConfigError, match=rf"prompt: 1025 tokens are more than {limit}"):
        llm.generate([[5] * 1025])


def test_a_prompt_of_exactly_the_limit_gets_its_one_token(make_llm, prompts):
    llm = make_llm(max_model_len=100)

    output = llm.generate([prompts[9]], GREEDY)[0]

    assert (len(output.token_ids), output.finish_reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": (1 << 31) + 1}, "num_pages"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_batch": 0}, "max_batch"),
        ({"chunk_tokens": 30}, "chunk_tokens"),
        ({"num_threads": 0}, "num_threads"),
        ({"max_model_len": 1025}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"device": "cuda:1"}, "device"),
        ({"stored_format": "fp8"}, "stored_format"),
        ({"device": "cuda", "kv_dtype": "float32"}, "device"),
    ],
)
def test_a_setting_out_of_range_is_a_config_error_that_names_it(make_llm, settings, field):
    with pytest.raises(ConfigError) as caught:
        make_llm(**settings)

    assert caught.value.fields["field"] == field


def test_misuse_of_generate_is_named(make_llm, prompts):
    llm = make_llm()
    with pytest.raises(ConfigError, match="give a list of prompts"):
        llm.generate("one text")
    with pytest.raises(ConfigError, match="2 for 1 prompts"):
        llm.generate([prompts[0]], [GREEDY, GREEDY])
    llm.add_request(prompts[0], request_id="x")
    with pytest.raises(ConfigError, match="'x' is in use"):
        llm.add_request(prompts[0], request_id="x")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"request_id": 5}, "request_id: 5 is no text; use 1 to 200 bytes of UTF-8"),
        ({"request_id": b"r"}, "request_id: b'r' is no text"),
        ({"first_token_ids": 5}, "first_token_ids: 5 is no list of token ids; use whole numbers"),
        ({"first_token_ids": "5"}, "first_token_ids: '5' is no list of token ids"),
        ({"first_token_ids": [None]}, "first_token_ids: None at 0 is no token id; use whole numbers"),
    ],
)
def test_ids_of_a_wrong_type_are_named(make_llm, prompts, ids, message):
    llm = make_llm()

    with pytest.raises(ConfigError, match=message) as caught:
        llm.add_request(prompts[0], GREEDY, **ids)

    assert caught.value.fields["field"] == next(iter(ids))
    assert not llm.has_unfinished


def test_ids_of_numpy_are_ids(make_llm, prompts):
    llm = make_llm()
    expected = llm.generate([prompts[3]], GREEDY)[0].token_ids

    assert llm.generate([np.array(prompts[3])], GREEDY)[0].token_ids == expected


def test_a_closed_engine_says_so(make_llm, prompts):
    llm = make_llm()
    llm.add_request(prompts[0])

    llm.close()

    assert not llm.has_unfinished
    with pytest.raises(ConfigError, match="closed"):
        llm.add_request(prompts[0])


def test_tokens_of_added_requests_outlast_generate_and_stream(make_llm, prompts, expected):
    """Their deltas come with the next steps, each once and in order, also when the requests ended meanwhile."""
    llm = make_llm()
    ids = [llm.add_request(prompt, GREEDY) for prompt in prompts[:2]]

    llm.generate([prompts[2]], GREEDY)
    list(llm.stream(prompts[3], GREEDY))

    deltas = []
    while llm.has_unfinished:
        deltas += llm.step()
    assert llm.step() == []
    for request_id, reference in zip(ids, expected[:2], strict=True):
        mine = [delta for delta in deltas if delta.request_id == request_id]
        assert [delta.output is None for delta in mine] == [True] * (len(mine) - 1) + [False]
        assert mine[-1].output.token_ids == tuple(delta.token_id for delta in mine)
        assert same_tokens(reference, mine[-1].output) > 5


def test_an_aborted_request_hands_out_no_more_tokens(make_llm, prompts):
    llm = make_llm()
    llm.add_request(prompts[5], SamplingParams(max_tokens=40, ignore_eos=True), request_id="mine")
    llm.generate([prompts[4]], SamplingParams(max_tokens=4, ignore_eos=True))

    assert len(llm.abort("mine").token_ids) > 2

    assert not llm.has_unfinished
    assert llm.step() == []


@pytest.mark.parametrize(
    ("request_id", "value"),
    [("", "0 bytes"), ("x" * 201, "201 bytes"), ("\u00e9" * 101, "202 bytes"), ("\ud800", r"'\\ud800'")],
    ids=["empty", "long", "long_in_bytes", "lone_surrogate"],
)
def test_a_request_id_that_no_store_takes_is_refused(make_llm, prompts, request_id, value):
    llm = make_llm()

    with pytest.raises(ConfigError, match=f"request_id: .*{value}.*use 1 to 200 bytes of UTF-8") as caught:
        llm.add_request(prompts[0], GREEDY, request_id=request_id)

    assert caught.value.fields["field"] == "request_id"
    assert not llm.has_unfinished


@pytest.mark.parametrize("request_id", ["x", "x" * 200, "\u00e9" * 100], ids=["short", "long", "long_in_bytes"])
def test_a_request_id_of_up_to_200_bytes_is_served(make_llm, prompts, request_id):
    llm = make_llm()

    llm.add_request(prompts[0], SamplingParams(max_tokens=1), request_id=request_id)

    assert [delta.request_id for delta in llm.step() + llm.step() + llm.step()] == [request_id]
