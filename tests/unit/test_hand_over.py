"""Prompts handed from a producer to a consumer through the real store: full blocks and the tail, so that nothing is left to
prefill; and what is left to prefill when the tail is not there."""

from collections.abc import Iterator

import pytest
from engine_side import BLOCK, SPEC, Request, Side, pages
from in_process_sidecar import InProcessSidecar

from kvstore.core.limits import TAIL_KEEP_S
from kvstore.core.plans import FetchPlan
from kvstore.engine_connector.protocol import CacheOptions, HandOver, LoadJob, SaveJob, ScheduledRequest

FULL, TAIL = 3, 5
PROMPT = FULL * BLOCK + TAIL


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


@pytest.fixture
def producer(sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"producer", hand_over=HandOver.PRODUCER)
    yield side
    side.side.close()


@pytest.fixture
def consumer(sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"consumer", hand_over=HandOver.CONSUMER)
    yield side
    side.side.close()


def prompt(**fields: object) -> Request:
    return Request("r", FULL, TAIL, **fields)


def taken_over(**fields: object) -> Request:
    """The same prompt with the first token that the producer generated."""
    return prompt(num_generated=1, **fields)


def prefill(side: Side, request: Request, first: int = 0) -> tuple[SaveJob, ...]:
    """The step that computes the prompt from token `first` on."""
    return side.step(ScheduledRequest(request, pages(request), first, request.num_prompt_tokens - first)).saves


def match(side: Side, request: Request, num_computed: int = 0) -> int:
    return side.side.get_num_new_matched_tokens(request, num_computed)


def load(side: Side, request: Request, num_tokens: int) -> LoadJob:
    side.side.update_state_after_alloc(request, pages(request), num_tokens)
    (job,) = side.step().loads
    return job


def hand_over(producer: Side, **fields: object) -> tuple[SaveJob, ...]:
    request = prompt(**fields)
    jobs = prefill(producer, request)
    producer.report_saved(*jobs)
    assert not producer.side.request_finished(request)
    return jobs


def test_a_prompt_is_taken_over_without_a_token_to_prefill(
    producer: Side, consumer: Side, sidecar: InProcessSidecar
) -> None:
    blocks, tail = hand_over(producer)
    assert [move.block_id for move in (*blocks.moves, *tail.moves)] == [100, 101, 102, 103]
    request = taken_over()

    assert match(consumer, request) == PROMPT
    job = load(consumer, request, PROMPT)

    assert [move.block_id for move in job.moves] == [100, 101, 102, 103]
    assert [move.offset for move in job.moves] == [move.offset for move in (*blocks.moves, *tail.moves)]
    consumer.report_loaded(job)
    assert not consumer.side.request_finished(request)
    sidecar.check_no_lease()


def test_a_prompt_that_is_handed_over_is_fetched_whatever_it_would_cost_to_compute(
    producer: Side, consumer: Side
) -> None:
    hand_over(producer)
    consumer.client.plan = FetchPlan(0, False, 0, 0.0, 1.0, 1.0, 0.0, "computing is cheap")
    assert match(consumer, taken_over()) == PROMPT
    assert consumer.client.match_wishes == [None]


def test_what_the_consumer_has_itself_is_not_loaded(producer: Side, consumer: Side) -> None:
    hand_over(producer)
    request = taken_over()

    assert match(consumer, request, FULL * BLOCK) == TAIL

    job = load(consumer, request, TAIL)
    assert [move.block_id for move in job.moves] == [103]
    consumer.report_loaded(job)


def test_a_prompt_shorter_than_a_block_is_all_tail(producer: Side, consumer: Side) -> None:
    short = Request("short", 0, extra=3)
    (save,) = prefill(producer, short)
    producer.report_saved(save)

    assert match(consumer, Request("short", 0, extra=3, num_generated=1)) == 3


def test_a_prompt_of_full_blocks_has_no_tail(producer: Side, consumer: Side) -> None:
    even = Request("even", FULL, extra=0)
    (save,) = prefill(producer, even)
    producer.report_saved(save)

    assert match(consumer, Request("even", FULL, extra=0, num_generated=1)) == FULL * BLOCK


def test_chunks_save_the_tail_with_the_last_one(producer: Side, consumer: Side) -> None:
    request = prompt()
    first = producer.step(ScheduledRequest(request, pages(request), 0, BLOCK)).saves
    last = prefill(producer, request, first=BLOCK)
    assert [len(job.moves) for job in (*first, *last)] == [1, FULL - 1, 1]

    producer.report_saved(*first, *last)

    assert match(consumer, taken_over()) == PROMPT


def test_a_prompt_found_in_the_store_is_handed_over_with_its_tail_alone(producer: Side, consumer: Side) -> None:
    consumer.store(Request("earlier", FULL))
    request = prompt()
    assert match(producer, request) == FULL * BLOCK, "a producer reuses full blocks as anybody does"
    producer.report_loaded(load(producer, request, FULL * BLOCK))

    (tail,) = prefill(producer, request, first=FULL * BLOCK)

    assert [move.block_id for move in tail.moves] == [103]
    producer.report_saved(tail)
    assert match(consumer, taken_over()) == PROMPT


# --- when there is no tail ----------------------------------------------------------------------------------------------


def test_a_tail_that_outlived_its_time_leaves_the_tail_to_prefill(
    producer: Side, consumer: Side, sidecar: InProcessSidecar
) -> None:
    hand_over(producer)
    sidecar.clock.advance(TAIL_KEEP_S - 0.1)
    assert match(consumer, taken_over()) == PROMPT
    sidecar.clock.advance(0.2)
    sidecar.store.expire(sidecar.clock.now_s())

    assert match(consumer, taken_over()) == FULL * BLOCK


def test_a_tail_lives_no_longer_than_its_request_wishes(
    producer: Side, consumer: Side, sidecar: InProcessSidecar
) -> None:
    consumer.store(Request("earlier", FULL))  # the full blocks are there for good
    hand_over(producer, cache=CacheOptions(ttl_s=10.0))
    assert match(consumer, taken_over()) == PROMPT
    sidecar.clock.advance(10.1)
    sidecar.store.expire(sidecar.clock.now_s())

    assert match(consumer, taken_over()) == FULL * BLOCK


def test_a_tail_lost_between_match_and_lease_is_reported_as_failed(
    producer: Side, consumer: Side, sidecar: InProcessSidecar
) -> None:
    hand_over(producer)
    request = taken_over()
    assert match(consumer, request) == PROMPT
    sidecar.store.drop(SPEC.namespace(), [request.tail_hash])

    job = load(consumer, request, PROMPT)

    assert [move.block_id for move in job.moves] == [100, 101, 102]
    assert job.lost_block_ids == (103,)
    consumer.report_loaded(job)
    assert match(consumer, request) == 0


def test_a_tail_whose_prompt_was_declined_is_not_stored(producer: Side, consumer: Side) -> None:
    """A parent that is not held makes it an orphan."""
    request = prompt()
    blocks, tail = prefill(producer, request)
    producer.report_saved(blocks, written=False)
    producer.report_saved(tail)

    assert match(consumer, taken_over()) == 0
    assert not producer.side.request_finished(request)


@pytest.mark.parametrize("role", [None, HandOver.CONSUMER])
def test_only_a_producer_saves_tails(sidecar: InProcessSidecar, consumer: Side, role: HandOver | None) -> None:
    other = Side(sidecar, b"other", hand_over=role)
    (blocks,) = prefill(other, prompt())
    other.report_saved(blocks)

    assert match(consumer, taken_over()) == FULL * BLOCK
    other.side.close()


@pytest.mark.parametrize("role", [None, HandOver.PRODUCER])
def test_only_a_consumer_loads_tails(sidecar: InProcessSidecar, producer: Side, role: HandOver | None) -> None:
    hand_over(producer)
    other = Side(sidecar, b"other", hand_over=role)

    assert match(other, taken_over()) == FULL * BLOCK
    other.side.close()


def test_each_of_a_pool_hands_over_to_each(sidecar: InProcessSidecar) -> None:
    one, two = (Side(sidecar, name, hand_over=HandOver.BOTH) for name in (b"one", b"two"))

    for giver, taker in ((one, two), (two, one)):
        hand_over(giver)
        assert match(taker, taken_over()) == PROMPT
        sidecar.store.drop(SPEC.namespace(), None)

    one.side.close()
    two.side.close()


def test_the_prompts_last_token_is_computed_by_whoever_has_no_first_token(producer: Side, consumer: Side) -> None:
    hand_over(producer)

    assert match(consumer, prompt()) == FULL * BLOCK


def test_a_request_that_outgrew_the_tails_page_has_the_full_block_or_nothing(producer: Side, consumer: Side) -> None:
    """After a preemption: blocks with generated tokens are keys of their own."""
    hand_over(producer)
    longer = taken_over()
    longer.num_generated = BLOCK
    longer.block_hashes = [*longer.block_hashes, b"\x07" * 16]
    assert match(consumer, longer) == FULL * BLOCK

    producer.report_saved(*producer.fill(longer, 0, FULL + 1))

    assert match(consumer, longer) == (FULL + 1) * BLOCK


def test_a_request_preempted_within_the_tails_page_is_given_the_prompt(producer: Side, consumer: Side) -> None:
    hand_over(producer)
    longer = taken_over()
    longer.num_generated = 4

    assert match(consumer, longer) == PROMPT


def test_a_page_that_holds_generated_tokens_is_not_saved_as_a_tail(producer: Side) -> None:
    """A request that was preempted while it decoded is computed again up to its last token."""
    request = taken_over()

    share = ScheduledRequest(request, pages(request), 0, PROMPT + 1)

    (blocks,) = producer.step(share).saves
    assert [move.block_id for move in blocks.moves] == [100, 101, 102]


def test_a_request_that_stores_nothing_hands_nothing_over(producer: Side, consumer: Side) -> None:
    assert hand_over(producer, cache=CacheOptions(no_store=True)) == ()
    assert prefill(producer, Request("all tail", 0, extra=3, cache=CacheOptions(no_store=True))) == ()

    assert match(consumer, taken_over()) == 0


def test_an_absent_store_takes_no_tail(producer: Side, sidecar: InProcessSidecar) -> None:
    sidecar.away = True

    assert prefill(producer, prompt()) == ()
