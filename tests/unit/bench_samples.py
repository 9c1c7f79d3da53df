"""Samples for the tests of kvstore.bench."""

from kvstore.bench.sample import Exchange, Failure, Sample, Usage

THREE_TOKENS = Usage(10, 3, 4)


def sample(
    conversation: int = 0,
    turn: int = 0,
    *,
    sent_s: float = 0.0,
    times_s: tuple[float, ...] = (1.0, 1.5, 2.0),
    done_s: float = 2.0,
    text: str = "an answer",
    finish_reason: str = "stop",
    usage: Usage | None = THREE_TOKENS,
    failure: Failure | None = None,
    due_s: float | None = None,
) -> Sample:
    """An answer of three tokens; times are given as they are, not from `sent_s`."""
    exchange = Exchange(sent_s, done_s, times_s, text, finish_reason, usage, failure)
    return Sample(conversation, turn, 12, 3, due_s, exchange)
