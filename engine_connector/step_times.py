"""How long an engine's steps take, measured from outside, for Report."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.clock import Clock
from kvstore.engine_connector.protocol import ScheduledRequest, WorkerOutput

REPORT_INTERVAL_S = 1.0
"""At most one Report in so long. Speeds change with what else runs on the machine, and that seldom within a second."""

MAX_SAMPLES = 64
"""That one Report carries; the last ones. More steps than this in REPORT_INTERVAL_S are too short to tell much each."""

_MAX_PENDING = 8
"""Steps begun of which no report has come. An engine that runs ahead has two."""

_MAX_DECODES = 1 / 8
"""A step says what prefill costs if no more of its tokens than this are decodes, which cost something else."""


class StepSample(NamedTuple):
    """One step of prefill. A share of n tokens behind s has n*s + n*n/2 pairs."""

    num_tokens: float
    num_pairs: float
    seconds: float


class SpeedReport(NamedTuple):
    """What is new since the last one."""

    prefill: tuple[StepSample, ...]
    copy_nbytes: int
    copy_s: float


class _Begun(NamedTuple):
    begun_s: float
    num_tokens: int
    num_pairs: float


class StepTimes:
    """Steps are numbered by `begin`, and ended by the report of the same number, which may come after the next has begun."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_steps = 0
        self._begun: dict[int, _Begun] = {}
        self._request_ids: frozenset[str] = frozenset()  # of the last step
        self._ended_s = clock.now_s()
        self._reported_s = clock.now_s()
        self._samples: list[StepSample] = []
        self._copy_nbytes = 0
        self._copy_s = 0.0

    def num_others(self, request_id: str) -> int:
        """How many other requests the last step computed."""
        return len(self._request_ids - {request_id})

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """A step begins. Its number, from 1 on."""
        self._num_steps += 1
        self._request_ids = frozenset(share.request.request_id for share in scheduled)
        counts = [(share.num_scheduled_tokens, share.num_computed_tokens) for share in scheduled]
        num_tokens = sum(n for n, _ in counts)
        if sum(n for n, _ in counts if n == 1) <= _MAX_DECODES * num_tokens and num_tokens:
            pairs = sum(n * s + n * n / 2 for n, s in counts)
            self._begun[self._num_steps] = _Begun(self._clock.now_s(), num_tokens, pairs)
            if len(self._begun) > _MAX_PENDING:
                del self._begun[next(iter(self._begun))]
        return self._num_steps

    def end(self, output: WorkerOutput) -> None:
        """A report came. The step of its number took from its begin, or from the end of the one before if that was later."""
        now_s, begun = self._clock.now_s(), self._begun.pop(output.step, None)
        for step in [step for step in self._begun if step < output.step]:
            del self._begun[step]
        if begun is not None:
            seconds = now_s - max(begun.begun_s, self._ended_s)
            self._samples = [*self._samples, StepSample(begun.num_tokens, begun.num_pairs, seconds)][-MAX_SAMPLES:]
        self._ended_s = now_s
        self._copy_nbytes += output.load_bytes
        self._copy_s += output.load_seconds

    def take_due(self) -> SpeedReport | None:
        """What to report now; None: nothing new, or too early."""
        now_s = self._clock.now_s()
        if now_s - self._reported_s < REPORT_INTERVAL_S or not (self._samples or self._copy_nbytes):
            return None
        report = SpeedReport(tuple(self._samples), self._copy_nbytes, self._copy_s)
        self._reported_s, self._samples, self._copy_nbytes, self._copy_s = now_s, [], 0, 0.0
        return report
