"""The scheduler against pages that remember whose tokens are in them: whatever comes, each sequence finds its own KV.

A slot of a page holds the whole prefix that its KV depends on. A share may compute only when all slots before it hold its
sequence's own prefixes, so that a page given away too early, shared too long, copied too late or loaded half is seen at
once. The next token is a function of the tokens so far, of the sample and of nothing else: what a request gives is known
before it runs.
"""

import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.keys import HashScheme
from kvstore.engine_connector.engine.block_manager import BlockManager
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.output_text import OutputText
from kvstore.engine_connector.engine.sampler import SampledToken, SamplingParams
from kvstore.engine_connector.engine.scheduler import Scheduler, SchedulerConfig
from kvstore.engine_connector.engine.sequence import FinishReason, Sequence
from kvstore.engine_connector.engine.step import ScheduledSequence
from kvstore.engine_connector.protocol import CacheOptions, ConnectorMetadata, WorkerOutput

BLOCK, STOP, GARBAGE = 4, 9, ("garbage",)


def next_token(tokens: list[int], sample: int) -> int:
    return zlib.crc32(bytes([*(t % 251 for t in tokens), sample])) % 10


def expected_tokens(prompt: list[int], params: SamplingParams, sample: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens and (tokens == prompt or tokens[-1] != STOP):
        tokens.append(next_token(tokens, sample))
    return tokens[len(prompt) :]


class Letters:
    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Whims:
    """A connector that offers what it was told to, and ends loads and saves when it is told to."""

    def __init__(self, pages: list[list[tuple]]) -> None:
        self.pages = pages
        self.offers = 0  # blocks that the store has of whatever is asked for
        self.loading: dict[str, tuple[Sequence, list[int], int]] = {}  # table, tokens to load
        self.saving: dict[str, list[tuple[int, list[tuple]]]] = {}  # page and its content, by request
        self.finished: list[str] = []

    def get_num_new_matched_tokens(self, request: Sequence, num_computed_tokens: int) -> int:
        assert num_computed_tokens % BLOCK == 0
        assert request.request_id not in self.loading
        return min(self.offers * BLOCK, max(0, (request.num_tokens - 1) // BLOCK * BLOCK - num_computed_tokens))

    def update_state_after_alloc(self, request: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        if num_external_tokens:
            first = request.num_computed_tokens // BLOCK
            loaded = block_ids[first : first + num_external_tokens // BLOCK]
            for page in loaded:
                self.pages[page][:] = [GARBAGE] * BLOCK
            self.loading[request.request_id] = (request, loaded, request.num_computed_tokens)

    def build_connector_meta(self, scheduled: list, preempted_request_ids: frozenset[str]) -> ConnectorMetadata:
        for request_id in preempted_request_ids:
            self.end_saves(request_id)
        return ConnectorMetadata(preempted_request_ids=preempted_request_ids)

    def start_save(self, share: ScheduledSequence) -> None:
        pages = share.sequence.block_ids[share.start // BLOCK : share.end // BLOCK]
        if pages:
            saves = self.saving.setdefault(share.sequence.request_id, [])
            saves += [(page, list(self.pages[page])) for page in pages]

    def end_saves(self, request_id: str) -> None:
        for page, content in self.saving.pop(request_id, []):
            assert self.pages[page] == content, "a page changed while it was being saved"

    def end_load(self, request_id: str, num_good: int) -> WorkerOutput:
        """The first `num_good` blocks arrive, the others do not."""
        request, loaded, start = self.loading.pop(request_id)
        for i, page in enumerate(loaded):
            assert self.pages[page] == [GARBAGE] * BLOCK, "somebody wrote a page that is being loaded"
            if i < num_good:
                first = start + i * BLOCK
                self.pages[page][:] = [tuple(request.token_ids[: first + j + 1]) for j in range(BLOCK)]
        return WorkerOutput(frozenset({request_id}), frozenset(loaded[num_good:]))

    def update_connector_output(self, output: WorkerOutput) -> None:
        return

    def request_finished(self, request: Sequence) -> bool:
        assert request.request_id not in self.finished
        self.finished.append(request.request_id)
        return self.has_pending(request.request_id)

    def has_pending(self, request_id: str) -> bool:
        return request_id in self.loading or request_id in self.saving

    def close(self) -> None:
        return


class Traffic(RuleBasedStateMachine):
    """Arrivals, aborts, loads that fail, saves that linger, few pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[list[tuple]] = [[GARBAGE] * BLOCK for _ in range(14)]
        self.connector = Whims(self.pages)
        config = SchedulerConfig(block_tokens=BLOCK, max_batch=5, chunk_tokens=8, max_model_len=56, prefix_caching=True)
        self.scheduler = Scheduler(config, BlockManager(14), self.connector, frozenset({STOP}), self.copy)
        self.samples: dict[tuple[str, int], Sequence] = {}
        self.num_added = 0
        self.now_s = 0.0

    def copy(self, source: int, target: int) -> None:
        assert source != target
        self.pages[target][:] = self.pages[source]

    @rule(
        length=st.integers(1, 20),
        family=st.integers(0, 2),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        max_tokens=st.integers(1, 14),
        priority=st.integers(-1, 1),
        fails=st.booleans(),
        cache=st.sampled_from([{}, {}, {}, {"salt": "s"}, {"no_read": True}, {"no_store": True}]),
    )
    def add(self, length, family, n, max_tokens, priority, fails, cache) -> None:
        options = RequestOptions(
            priority=priority, load_failure="fail" if fails else "recompute", cache=CacheOptions(**cache)
        )
        sequence = Sequence(
            request_id=f"r{self.num_added}",
            token_ids=[100 * family + 10 + i for i in range(length)],
            params=SamplingParams(n=n, max_tokens=max_tokens, seed=0),
            arrival=self.num_added,
            arrival_s=self.now_s,
            hash_scheme=HashScheme(block_tokens=BLOCK),
            new_text=lambda: OutputText(Letters()),
            options=options,
        )
        self.num_added += 1
        self.now_s += 7.0
        self.scheduler.add(sequence)
        self.samples[sequence.request_id, 0] = sequence

    @rule(offers=st.sampled_from([0, 0, 1, 2, 9]), data=st.data())
    def step(self, offers: int, data: st.DataObject) -> None:
        self.connector.offers = offers
        output = WorkerOutput()
        step = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in step.chunks) <= 8
        sampled = []
        for share in step.scheduled:
            sampled += self.compute(share)
        if self.connector.loading and data.draw(st.booleans()):
            request_id = data.draw(st.sampled_from(sorted(self.connector.loading)))
            output = self.connector.end_load(request_id, data.draw(st.integers(0, 5)))
        for sequence in (*self.scheduler.update(step, sampled, output), *self.scheduler.take_failed()):
            self.samples[sequence.group_id, sequence.index] = sequence

    def compute(self, share: ScheduledSequence) -> list[SampledToken]:
        sequence = share.sequence
        for position in range(share.end):
            page = self.pages[sequence.block_ids[position // BLOCK]]
            prefix = tuple(sequence.token_ids[: position + 1])
            if position < share.start:
                assert page[position % BLOCK] == prefix, (sequence.request_id, position)
            page[position % BLOCK] = prefix
        self.connector.start_save(share)
        indices = range(share.num_samples) if share.num_samples > 1 else [sequence.index] * share.num_samples
        return [SampledToken(next_token(sequence.token_ids, index), 1.0) for index in indices]

    @precondition(lambda self: self.connector.saving)
    @rule(data=st.data())
    def saves_end(self, data: st.DataObject) -> None:
        self.connector.end_saves(data.draw(st.sampled_from(sorted(self.connector.saving))))

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [key for key, sequence in self.samples.items() if sequence.finish_reason is None]
        self.scheduler.abort(self.samples[data.draw(st.sampled_from(sorted(live)))])

    @invariant()
    def no_page_is_lost(self) -> None:
        self.scheduler.check()

    @invariant()
    def what_came_is_what_had_to_come(self) -> None:
        for (_, index), sequence in self.samples.items():
            expected = expected_tokens(sequence.token_ids[: sequence.num_prompt_tokens], sequence.params, index)
            assert sequence.output_ids == expected[: sequence.num_output_tokens]
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert sequence.output_ids == expected

    def teardown(self) -> None:
        """Everything ends, and then every page is free."""
        self.connector.offers = 0
        for _ in range(2000):
            if not (self.scheduler.has_unfinished or self.scheduler.is_draining):
                break
            output = WorkerOutput()
            step = self.scheduler.schedule()
            sampled = [token for share in step.scheduled for token in self.compute(share)]
            if self.connector.loading:
                output = self.connector.end_load(min(self.connector.loading), 1)
            for sequence in (*self.scheduler.update(step, sampled, output), *self.scheduler.take_failed()):
                self.samples[sequence.group_id, sequence.index] = sequence
            for request_id in list(self.connector.saving):
                self.connector.end_saves(request_id)
            self.no_page_is_lost()
        assert not self.scheduler.has_unfinished
        assert self.scheduler._blocks.num_free == 14
        self.what_came_is_what_had_to_come()
        assert sum(self.scheduler.num_finished.values()) == sum(
            sequence.params.n for (_, index), sequence in self.samples.items() if index == 0
        )


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
