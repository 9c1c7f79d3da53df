"""Two runs of the same requests: ratios, and whether the answers are the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.bench.measures import LATENCIES, Summary
from kvstore.bench.sample import Sample

STATISTICS = ("mean", "p50", "p90", "p99")
_EXCERPT = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """The first request, in the workload's order, whose two answers differ, from character `position` on."""

    request: str
    position: int
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a second run with a first. Ratios are second / first, by "ttft_s p50" or "output_tokens_per_s"; a figure that one of
    them lacks, or a first of 0, has none.

    compared     requests that both answered, as far as their prompts are the same: a conversation's turns after a difference
                 or a failure carry another history and do not count
    unmatched    the other requests, failed ones included
    """

    ratios: dict[str, float]
    compared: int
    different: int
    unmatched: int
    first_difference: Difference | None

    @property
    def same_outputs(self) -> bool:
        """Whether no compared answer differs."""
        return self.different == 0


def compare(first: Sequence[Sample], second: Sequence[Sample], summaries: tuple[Summary, Summary]) -> Comparison:
    """Samples of the same workload; `summaries` are theirs."""
    others = {(sample.conversation, sample.turn): sample for sample in second}
    parted: set[int] = set()
    compared, differences = 0, []
    for sample in sorted(first, key=lambda entry: (entry.conversation, entry.turn)):
        other = others.get((sample.conversation, sample.turn))
        if sample.conversation in parted:
            continue
        if other is None or not (sample.ok and other.ok):
            parted.add(sample.conversation)
            continue
        compared += 1
        if sample.output_digest() != other.output_digest():
            parted.add(sample.conversation)
            differences.append(_difference(sample, other))
    return Comparison(
        ratios=_ratios(*summaries),
        compared=compared,
        different=len(differences),
        unmatched=len(first) - compared,
        first_difference=differences[0] if differences else None,
    )


def _difference(first: Sample, second: Sample) -> Difference:
    texts = (first.exchange.text, second.exchange.text)
    position = _common_length(*texts)
    if texts[0] == texts[1]:
        return Difference(
            first.name,
            position,
            f"finish_reason {first.exchange.finish_reason}",
            f"finish_reason {second.exchange.finish_reason}",
        )
    return Difference(first.name, position, *(text[position : position + _EXCERPT] for text in texts))


def _common_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _ratios(first: Summary, second: Summary) -> dict[str, float]:
    pairs: dict[str, tuple[float, float]] = {}
    for name in LATENCIES:
        one, other = first.latencies[name], second.latencies[name]
        if one and other:
            pairs |= {f"{name} {what}": (getattr(one, what), getattr(other, what)) for what in STATISTICS}
    for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_per_s"):
        one_rate, other_rate = getattr(first, name), getattr(second, name)
        if one_rate is not None and other_rate is not None:
            pairs[name] = (one_rate, other_rate)
    return {name: other / one for name, (one, other) in pairs.items() if one}
