"""A prefill engine hands prompts to a decode engine through a real sidecar: the decode engine prefills nothing, and what they
say together is what one engine says alone. Then the tail is gone, late, or unreadable: the tail alone is prefilled."""

import math

import numpy as np
import pytest
from engines import BLOCK, Bench, Engine
from sidecar_process import SidecarProcess, connected, tool

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.llm import RequestOutput
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.protocol import CacheOptions, HandOver
from kvstore.proto import kvstore_pb2 as pb

pytestmark = pytest.mark.e2e

NUM_TOKENS = 12
FIRST = SamplingParams(max_tokens=1, ignore_eos=True)
WHOLE = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def producer(bench: Bench, sidecar: SidecarProcess) -> Engine:
    return bench.engine(sidecar.socket, hand_over=HandOver.PRODUCER)


@pytest.fixture
def consumer(bench: Bench, sidecar: SidecarProcess) -> Engine:
    return bench.engine(sidecar.socket, hand_over=HandOver.CONSUMER)


def first_token(producer: Engine, prompt: list[int], options: RequestOptions | None = None) -> int:
    """What the prefill engine answers once all is saved."""
    (output,) = producer.llm.generate([prompt], FIRST, options=options)
    producer.check()
    return output.token_ids[0]


def take_over(
    consumer: Engine,
    *handed: tuple[list[int], int],
    options: RequestOptions | None = None,
    max_tokens: int = NUM_TOKENS,
) -> list[RequestOutput]:
    """The decode engine's answers to prompts with their first tokens, batched."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [
        consumer.llm.add_request(prompt, params, options=options, first_token_ids=(token,)) for prompt, token in handed
    ]
    outputs: dict[str, RequestOutput] = {}
    texts = dict.fromkeys(ids, "")
    while consumer.llm.has_unfinished or consumer.llm.is_draining:
        for delta in consumer.llm.step():
            texts[delta.request_id] += delta.text
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        consumer.llm.check()
    consumer.check()
    assert all(outputs[i].text == texts[i] for i in ids), "the text comes whole, the first token's too"
    return [outputs[i] for i in ids]


@pytest.mark.parametrize("num_tokens", [1, 3, BLOCK, BLOCK + 1, 63, 64, 65, 199])
def test_the_decode_engine_prefills_nothing_and_answers_alike(
    bench: Bench, producer: Engine, consumer: Engine, num_tokens: int
) -> None:
    (prompt,) = bench.prompts(num_tokens, seed=num_tokens)

    (output,) = take_over(consumer, (prompt, first_token(producer, prompt)))

    assert (output.num_prefilled_tokens, output.num_fetched_tokens) == (0, num_tokens)
    bench.expect_same([output], prompt, params=WHOLE)
    assert math.isnan(output.logit_gaps[0])
    assert min(output.logit_gaps[1:]) > 0


def test_a_batch_is_taken_over_side_by_side(bench: Bench, producer: Engine, consumer: Engine) -> None:
    prompts = bench.prompts(5, 17, 32, 50, 111, seed=9)

    outputs = take_over(consumer, *[(prompt, first_token(producer, prompt)) for prompt in prompts])

    assert [output.num_prefilled_tokens for output in outputs] == [0] * len(prompts)
    bench.expect_same(outputs, *prompts, params=WHOLE)


def test_the_tails_page_is_the_tail_and_zeros(bench: Bench, sidecar: SidecarProcess, producer: Engine) -> None:
    (prompt,) = bench.prompts(BLOCK + 2, seed=3)
    first_token(producer, prompt)
    spec = producer.llm.spec
    hashes = spec.hash.hash_blocks(prompt)
    keys = [*hashes, spec.hash.tail_hash(prompt[BLOCK:], parent=hashes[-1])]

    with connected(sidecar, spec=spec) as client:
        lease = client.acquire("r", spec.namespace(), keys, first_needed=1)
        offset = int(lease.offsets[0])
        block = client.arena.array[offset : offset + spec.block_nbytes].view(np.float16)
        page = block.reshape(spec.num_layers, spec.num_kv_heads, BLOCK, spec.planes, spec.head_dim).copy()
        client.release(lease.lease_id, pb.LOADED)

    assert np.abs(page[:, :, :2]).max(axis=(-1, -2)).min() > 0
    assert (page[:, :, 2:] == 0).all()


def test_the_next_turn_finds_what_both_engines_saved(bench: Bench, producer: Engine, consumer: Engine) -> None:
    (prompt,) = bench.prompts(61, seed=4)
    (output,) = take_over(consumer, (prompt, first_token(producer, prompt)))
    turn = [*prompt, *output.token_ids, 7, 8, 9]

    (first,) = producer.llm.generate([turn], FIRST)

    # The producer has the prompt's full blocks itself; the answer's come from the store, but for the token never computed.
    reused = first.num_local_cached_tokens + first.num_fetched_tokens
    assert reused == (len(prompt) + NUM_TOKENS - 1) // BLOCK * BLOCK
    (answer,) = take_over(consumer, (turn, first.token_ids[0]))
    assert answer.num_prefilled_tokens == 0
    bench.expect_same([answer], turn, params=WHOLE)


def test_a_producer_that_decodes_on_hands_over_all_the_same(bench: Bench, producer: Engine, consumer: Engine) -> None:
    (prompt,) = bench.prompts(62, seed=5)
    (whole,) = producer.ask(prompt, params=WHOLE)

    (output,) = take_over(consumer, (prompt, whole.token_ids[0]))

    assert output.num_prefilled_tokens == 0
    bench.expect_same([whole, output], prompt, prompt, params=WHOLE)


def test_seeded_sampling_goes_on_where_the_producer_stopped(bench: Bench, producer: Engine, consumer: Engine) -> None:
    (prompt,) = bench.prompts(30, seed=6)
    seeded = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
    (alone,) = bench.engine(producer._socket).llm.generate([prompt], SamplingParams(max_tokens=8, **seeded))
    (first,) = producer.llm.generate([prompt], SamplingParams(max_tokens=1, **seeded))
    request_id = consumer.llm.add_request(
        prompt, SamplingParams(max_tokens=8, **seeded), first_token_ids=first.token_ids
    )
    deltas = [delta for _ in range(50) if consumer.llm.has_unfinished for delta in consumer.llm.step()]

    assert deltas[-1].request_id == request_id
    assert deltas[-1].output is not None
    assert deltas[-1].output.token_ids == alone.token_ids


def test_salted_prompts_are_handed_over_to_the_same_salt_only(bench: Bench, producer: Engine, consumer: Engine) -> None:
    (prompt,) = bench.prompts(2, seed=7)
    salted = RequestOptions(cache=CacheOptions(salt="ours"))
    token = first_token(producer, prompt, salted)

    (other,) = take_over(consumer, (prompt, token))
    (ours,) = take_over(consumer, (prompt, token), options=salted)

    assert (other.num_fetched_tokens, ours.num_fetched_tokens) == (0, 2)


# --- without a tail ------------------------------------------------------------------------------------------------------


def drop_tail(sidecar: SidecarProcess, engine: Engine, prompt: list[int]) -> None:
    scheme, spec = engine.llm.spec.hash, engine.llm.spec
    hashes = scheme.hash_blocks(prompt)
    with tool(sidecar) as client:
        assert client.drop(spec.namespace(), [scheme.tail_hash(prompt[len(hashes) * BLOCK :], parent=hashes[-1])]) == 1


def test_without_its_tail_only_the_tail_is_prefilled(
    bench: Bench, sidecar: SidecarProcess, producer: Engine, consumer: Engine
) -> None:
    (prompt,) = bench.prompts(63, seed=8)
    token = first_token(producer, prompt)
    drop_tail(sidecar, consumer, prompt)

    (output,) = take_over(consumer, (prompt, token))

    # The tail's 3 tokens and the first one, which is computed with them.
    assert (output.num_fetched_tokens, output.num_prefilled_tokens) == (60, 4)
    bench.expect_same([output], prompt, params=WHOLE)


@pytest.mark.parametrize("fails", [1, 16])
def test_a_load_that_breaks_keeps_what_came_before(
    bench: Bench, sidecar: SidecarProcess, producer: Engine, fails: int
) -> None:
    """Of 15 full blocks and the tail, block `fails` breaks: the first, and the tail."""
    (prompt,) = bench.prompts(15 * BLOCK + 2, seed=10)
    token = first_token(producer, prompt)

    def before(way: str, number: int) -> None:
        if way == "in" and number == fails:
            raise ValueError("a copy that breaks")

    consumer = bench.engine(sidecar.socket, before=before, hand_over=HandOver.CONSUMER)
    (output,) = take_over(consumer, (prompt, token))

    assert output.num_prefilled_tokens == len(prompt) + 1 - output.num_fetched_tokens > 0
    assert output.num_fetched_tokens % BLOCK == 0
    bench.expect_same([output], prompt, params=WHOLE)


def test_a_dead_sidecar_leaves_the_whole_prompt_to_prefill(
    bench: Bench, sidecar: SidecarProcess, producer: Engine, consumer: Engine
) -> None:
    (prompt,) = bench.prompts(63, seed=11)
    token = first_token(producer, prompt)
    sidecar.kill()

    (output,) = take_over(consumer, (prompt, token))

    assert (output.num_fetched_tokens, output.num_prefilled_tokens) == (0, 64)
    bench.expect_same([output], prompt, params=WHOLE)


def test_an_engine_of_no_role_takes_over_with_the_tail_to_prefill(
    bench: Bench, sidecar: SidecarProcess, producer: Engine
) -> None:
    (prompt,) = bench.prompts(63, seed=12)
    token = first_token(producer, prompt)

    (output,) = take_over(bench.engine(sidecar.socket), (prompt, token))

    assert (output.num_fetched_tokens, output.num_prefilled_tokens) == (60, 4)
    bench.expect_same([output], prompt, params=WHOLE)


def test_preempted_consumers_answer_alike(bench: Bench, sidecar: SidecarProcess, producer: Engine) -> None:
    prompts = bench.prompts(41, 42, 43, seed=13)
    handed = [(prompt, first_token(producer, prompt)) for prompt in prompts]
    consumer = bench.engine(sidecar.socket, hand_over=HandOver.CONSUMER, num_pages=38)

    outputs = take_over(consumer, *handed, max_tokens=40)

    assert sum(output.num_preemptions for output in outputs) > 0
    bench.expect_same(outputs, *prompts, params=SamplingParams(max_tokens=40, ignore_eos=True))


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "params", "says"),
    [
        ((1 << 20,), WHOLE, "out of range"),
        ((-1,), WHOLE, "out of range"),
        ((5,), SamplingParams(max_tokens=4, n=2), "for n = 2 samples"),
        ((5, 6), SamplingParams(max_tokens=2), "leave nothing to generate"),
    ],
)
def test_first_tokens_that_make_no_sense_are_refused(
    consumer: Engine, first: tuple[int, ...], params: SamplingParams, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        consumer.llm.add_request([1, 2, 3], params, first_token_ids=first)

    assert caught.value.fields["field"] == "first_token_ids"


def test_an_answer_that_has_ended_is_not_taken_over(consumer: Engine) -> None:
    stop = min(consumer.llm.tokenizer.stop_ids)

    with pytest.raises(ConfigError, match="ends the answer"):
        consumer.llm.add_request([1, 2, 3], SamplingParams(max_tokens=4), first_token_ids=(stop,))


def test_an_answer_that_has_stopped_is_not_taken_over(consumer: Engine) -> None:
    first = consumer.llm.tokenizer.encode(" and so it")
    params = SamplingParams(max_tokens=40, stop=("so",))

    with pytest.raises(ConfigError, match="stop string") as caught:
        consumer.llm.add_request([1, 2, 3], params, request_id="r", first_token_ids=first)

    assert caught.value.fields["field"] == "first_token_ids"
    assert not consumer.llm.in_use("r")
