"""The scheduler's random traffic once more, with loads that are filled from both ends: each block is written by one side,
and each request gets what it gets alone."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_scheduler_model import BLOCK, GARBAGE, STOP, Traffic, Whims

from kvstore.engine_connector.engine.block_manager import BlockManager
from kvstore.engine_connector.engine.scheduler import Scheduler, SchedulerConfig
from kvstore.engine_connector.engine.sequence import Sequence
from kvstore.engine_connector.engine.step import ScheduledSequence
from kvstore.engine_connector.protocol import BothEnds, FilledFrom, WorkerOutput


class TwoEndedWhims(Whims):
    """Fills from the back what it is told to; how far the back is, rules say."""

    def __init__(self, pages: list[list[tuple]]) -> None:
        super().__init__(pages)
        self.fills: dict[str, list[int]] = {}  # front and back, of loads
        self.bound = 99

    def use_both_ends(self, chunk_tokens: int) -> None:
        raise AssertionError("LLM does that")

    def fill_from_back(self, request: Sequence) -> bool:
        _, loaded, _ = self.loading[request.request_id]
        if self.bound % 3 == 2:
            return False
        self.fills[request.request_id] = [0, len(loaded)]
        return True

    def claim_front(self, request_id: str, num_blocks: int) -> int:
        fill = self.fills[request_id]
        assert 0 < num_blocks <= len(self.loading[request_id][1])
        fill[0] = max(fill[0], min(num_blocks, fill[1], self.bound))
        return min(num_blocks, fill[0])

    def copy_back(self, request_id: str, num_blocks: int) -> None:
        request, loaded, start = self.loading[request_id]
        front, back = self.fills[request_id]
        for index in range(back - 1, max(front, back - num_blocks) - 1, -1):
            page, first = loaded[index], start + index * BLOCK
            assert self.pages[page] == [GARBAGE] * BLOCK, "somebody wrote a page that was not claimed"
            self.pages[page][:] = [tuple(request.token_ids[: first + j + 1]) for j in range(BLOCK)]
            self.fills[request_id][1] = index

    def end_load(self, request_id: str, num_good: int) -> WorkerOutput:
        if request_id not in self.fills:
            return super().end_load(request_id, num_good)
        self.copy_back(request_id, num_good)
        front, back = self.fills.pop(request_id)
        _, loaded, _ = self.loading.pop(request_id)
        return WorkerOutput(
            frozenset({request_id}), frozenset(loaded[front:back]), filled_from=(FilledFrom(request_id, back),)
        )


class TwoEndedTraffic(Traffic):
    """As Traffic; some loads are from the back."""

    def __init__(self) -> None:
        super().__init__()
        self.connector = TwoEndedWhims(self.pages)
        config = SchedulerConfig(block_tokens=BLOCK, max_batch=5, chunk_tokens=8, max_model_len=56, prefix_caching=True)
        self.scheduler = Scheduler(
            config,
            BlockManager(14),
            self.connector,
            frozenset({STOP}),
            self.copy,
            both_ends=BothEnds(self.connector, self.connector),
        )

    def compute(self, share: ScheduledSequence) -> list:
        """What the front computes is not saved while the load goes on."""
        sampled = super().compute(share)
        if (fill := self.connector.fills.get(share.sequence.request_id)) is not None:
            assert share.end % BLOCK == 0
            _, _, start = self.connector.loading[share.sequence.request_id]
            assert share.end <= start + fill[0] * BLOCK, "computed, not claimed"
            assert not sampled
            self.connector.end_saves(share.sequence.request_id)
        return sampled

    @rule(bound=st.integers(0, 99))
    def the_front_may_go_so_far(self, bound: int) -> None:
        self.connector.bound = bound

    @precondition(lambda self: self.connector.fills)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def blocks_arrive(self, data: st.DataObject, num_blocks: int) -> None:
        self.connector.copy_back(data.draw(st.sampled_from(sorted(self.connector.fills))), num_blocks)


TestTwoEndedTraffic = TwoEndedTraffic.TestCase
TestTwoEndedTraffic.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
