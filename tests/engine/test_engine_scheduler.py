"""What is computed when, without a model: tokens come from a counter."""

import pytest

from kvstore.core.keys import HashScheme
from kvstore.engine_connector.engine.block_manager import BlockManager
from kvstore.engine_connector.engine.no_store import no_store
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.output_text import OutputText
from kvstore.engine_connector.engine.sampler import SampledToken, SamplingParams
from kvstore.engine_connector.engine.scheduler import Scheduler, SchedulerConfig
from kvstore.engine_connector.engine.sequence import FinishReason, Sequence
from kvstore.engine_connector.engine.step import Step
from kvstore.engine_connector.protocol import Request, WorkerOutput

BLOCK, STOP = 4, 99


class AskedConnector(type(no_store().scheduler)):
    """No store, but it notes what is asked, and of what."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        self.asked.append((request.request_id, num_computed_tokens))
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class Letters:
    """A decoder to which each token is a letter."""

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def finish(self) -> str:
        return ""


class Driver:
    """A scheduler whose steps are answered with token `next_token`."""

    def __init__(self, num_pages: int = 64, **settings: object) -> None:
        self.connector = AskedConnector()
        config: dict = {"max_batch": 4, "chunk_tokens": 16, "max_model_len": 1000, "prefix_caching": True}
        self.scheduler = Scheduler(
            SchedulerConfig(block_tokens=BLOCK, **(config | settings)),
            BlockManager(num_pages),
            self.connector,
            frozenset({STOP}),
            lambda source, target: self.copies.append((source, target)),
        )
        self.copies: list[tuple[int, int]] = []
        self.next_token = 7
        self.added = 0
        self.now_s = 0.0

    def add(self, prompt: int | list[int], options: RequestOptions | None = None, **params: object) -> Sequence:
        """A prompt of that many tokens, unlike any other's, or of those."""
        tokens = [1000 * self.added + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        sequence = Sequence(
            request_id=f"r{self.added}",
            token_ids=tokens,
            params=SamplingParams(**({"max_tokens": 10} | params)),
            arrival=self.added,
            arrival_s=self.now_s,
            hash_scheme=HashScheme(block_tokens=BLOCK),
            new_text=lambda: OutputText(Letters()),
            options=options or RequestOptions(),
        )
        self.added += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        tokens = [SampledToken(self.next_token, 1.0) for share in step.scheduled for _ in range(share.num_samples)]
        self.scheduler.update(step, tokens, WorkerOutput())
        self.scheduler.check()
        return step


def shares(step: Step) -> list[tuple[str, int, int]]:
    return [(share.sequence.request_id, share.start, share.end) for share in step.scheduled]


def test_chunks_end_at_absolute_multiples_also_after_a_cached_prefix():
    driver = Driver()
    first = driver.add(20, max_tokens=1)
    driver.step(), driver.step()
    driver.add([*first.token_ids[:20], *range(500, 530)])

    assert shares(driver.step()) == [("r1", 20, 32)]
    assert shares(driver.step()) == [("r1", 32, 48)]
    assert shares(driver.step()) == [("r1", 48, 50)]


def test_a_chunk_is_never_cut_to_fit_and_decodes_never_wait_for_one():
    driver = Driver()
    driver.add(3)
    driver.step()
    driver.add(30), driver.add(30)

    assert shares(driver.step()) == [("r0", 3, 4), ("r1", 0, 16)]
    assert shares(driver.step()) == [("r0", 4, 5), ("r1", 16, 30)]
    assert shares(driver.step()) == [("r0", 5, 6), ("r1", 30, 31), ("r2", 0, 16)]


def test_small_prompts_share_a_step():
    driver = Driver()
    for _ in range(3):
        driver.add(5)

    assert shares(driver.step()) == [("r0", 0, 5), ("r1", 0, 5), ("r2", 0, 5)]
    assert shares(driver.step()) == [("r0", 5, 6), ("r1", 5, 6), ("r2", 5, 6)]


def test_at_most_max_batch_requests_own_pages():
    driver = Driver(max_batch=2)
    for _ in range(3):
        driver.add(2, max_tokens=2)

    assert shares(driver.step()) == [("r0", 0, 2), ("r1", 0, 2)]
    assert shares(driver.step()) == [("r0", 2, 3), ("r1", 2, 3)]
    assert shares(driver.step()) == [("r2", 0, 2)]


def test_the_last_token_of_a_wholly_cached_prompt_is_computed():
    driver = Driver()
    first = driver.add(16, max_tokens=1)
    driver.step()
    again = driver.add(first.token_ids[:16])

    assert shares(driver.step()) == [("r1", 12, 16)]
    assert (again.counts.local_cached, again.counts.prefilled) == (12, 4)


def test_generated_blocks_are_found_by_the_next_turn():
    driver = Driver()
    first = driver.add(5, max_tokens=12)
    while driver.scheduler.has_unfinished:
        driver.step()
    turn = driver.add([*first.token_ids, 1, 2, 3])
    driver.step()

    assert turn.counts.local_cached == 16  # 5 prompt and 11 computed generated tokens


def test_the_youngest_is_preempted_and_starts_over_from_what_is_cached():
    driver = Driver(num_pages=4)
    old, young = driver.add(7), driver.add(7)
    driver.step()  # two pages each
    driver.step()  # token 8 of both fits

    step = driver.step()  # token 9 of the old one needs a page

    assert step.meta.preempted_request_ids == {"r1"}
    assert shares(step) == [("r0", 8, 9)]
    while old.finish_reason is None:
        driver.step()
    assert shares(driver.step())[0][0] == "r1"
    assert young.counts.preemptions == 1
    while driver.scheduler.has_unfinished:
        driver.step()
    assert len(young.output_ids) == len(old.output_ids) == 10


def test_a_request_that_was_preempted_goes_before_younger_ones():
    driver = Driver(num_pages=4)
    driver.add(7), driver.add(7)
    while not driver.step().meta.preempted_request_ids:
        pass
    driver.add(3)
    started: list[str] = []
    while driver.scheduler.has_unfinished:
        started += [share.sequence.request_id for share in driver.step().chunks]

    assert started[0] == "r1"
    assert "r2" in started


def test_a_prompt_waits_until_all_of_its_pages_fit():
    driver = Driver(num_pages=6)
    running = driver.add(15, max_tokens=2)
    driver.step()
    driver.add(12)

    assert shares(driver.step()) == [("r0", 15, 16)]
    assert running.finish_reason is FinishReason.LENGTH
    assert shares(driver.step()) == [("r1", 0, 12)]


def test_the_connector_hears_twice_of_a_request_that_waits_and_once_more_when_it_is_admitted():
    driver = Driver(max_batch=1)
    driver.add(5, max_tokens=8)
    driver.step()
    driver.connector.asked.clear()
    waiting = driver.add(5, max_tokens=1)

    for _ in range(5):
        driver.step()
    assert driver.connector.asked == [("r1", 0)] * 2
    while waiting.finish_reason is None:
        driver.step()

    assert driver.connector.asked == [("r1", 0)] * 3


def test_the_connector_hears_of_waiting_requests_what_the_engine_has_of_them():
    driver = Driver(max_batch=1)
    first = driver.add(9, max_tokens=8)
    driver.step()
    driver.connector.asked.clear()
    driver.add([*first.token_ids[:9], 1, 2])

    driver.step()

    assert driver.connector.asked == [("r1", 8)]


def test_the_connector_hears_of_the_head_of_the_queue_only():
    driver = Driver(max_batch=1)
    for _ in range(12):
        driver.add(5)

    for _ in range(5):
        driver.step()

    assert {request_id for request_id, _ in driver.connector.asked} == {"r0", "r1", "r2", "r3", "r4"}


def test_a_preempted_request_is_asked_about_anew():
    driver = Driver(num_pages=4)
    driver.add(7), driver.add(7)
    while not driver.step().meta.preempted_request_ids:
        driver.connector.asked.clear()

    for _ in range(3):
        driver.step()

    assert [request_id for request_id, _ in driver.connector.asked] == ["r1", "r1"]


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, FinishReason.STOP), (True, FinishReason.LENGTH)])
def test_a_stop_token_ends_a_request_unless_told_otherwise(ignore_eos, reason):
    driver = Driver()
    sequence = driver.add(3, ignore_eos=ignore_eos)
    driver.next_token = STOP
    while driver.scheduler.has_unfinished:
        driver.step()

    assert sequence.finish_reason is reason


def test_a_full_context_ends_a_request_with_one_token_beyond_it():
    driver = Driver(max_model_len=8)
    whole, part = driver.add(8), driver.add(6)
    while driver.scheduler.has_unfinished:
        driver.step()

    assert (len(whole.output_ids), len(part.output_ids)) == (1, 3)
    assert whole.finish_reason is part.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", range(5))
def test_abort_at_any_step_frees_all(steps):
    driver = Driver(max_batch=2)
    sequences = [driver.add(20) for _ in range(3)]
    for _ in range(steps):
        driver.step()

    for sequence in sequences:
        driver.scheduler.abort(sequence)
        driver.scheduler.check()

    assert not driver.scheduler.has_unfinished
    assert not any(sequence.block_ids for sequence in sequences)
    assert driver.scheduler.schedule().scheduled == ()
