"""What the demo found: an answer, a row of the table, and whether the store kept its promises.

"The same output" is ARCHITECTURE.md's definition: equal token ids, except from the first step on at which the storeless
run's own two best logits lie closer than TIE_EPSILON, since the same rows through a matrix product of another height differ
in the last bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

TIE_EPSILON = 0.02
"""In logits. What a 16-bit page and another order of sums can move; a real choice of the model is far wider."""

MAX_TTFT_RATIO = 0.1
"""B's time to first token with the document in the store, against A's when it computed it."""

MAX_KILLED_TTFT_RATIO = 0.2
"""Likewise when the sidecar was killed in between, so that the document comes from the drive."""

CASES = ("off", "cold_a", "warm_a", "warm_b", "restarted_a", "restarted_b", "sidecar_killed")
"""In the order in which they run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine process reports of one request."""

    ttft_s: float  # request in to first token out, inside the engine process
    prompt_tokens: int
    prefilled_tokens: int  # prompt tokens the engine computed
    local_cached_tokens: int  # prompt tokens found in the engine's own pool
    fetched_tokens: int  # prompt tokens that came from the store
    fetched_bytes: int
    token_ids: tuple[int, ...]
    logit_gaps: tuple[float, ...]  # at each step, best logit minus second best
    text: str
    namespace: str  # hex, as are the keys of the prompt's full blocks
    keys: str


class Sameness(NamedTuple):
    """Whether an output counts as the storeless one's, and how that was decided."""

    same: bool
    how: str


@dataclass(frozen=True, slots=True)
class Row:
    """One case of the demo."""

    case: str
    answer: Answer
    saved_bytes: int  # that reached the store during the case
    sameness: Sameness

    @property
    def moved_bytes(self) -> int:
        """Between the engine's pages and the store's arena, in either direction."""
        return self.answer.fetched_bytes + self.saved_bytes


def answer_from(fields: Mapping[str, Any]) -> Answer:
    """The answer that an engine process sent as JSON, whose lists become tuples again."""
    return Answer(**{**fields, "token_ids": tuple(fields["token_ids"]), "logit_gaps": tuple(fields["logit_gaps"])})


def compare(off: Answer, other: Answer) -> Sameness:
    """`other`'s tokens against those of a run that computed everything."""
    if off.token_ids == other.token_ids:
        return Sameness(same=True, how="identical")
    first_difference = _first_difference(off.token_ids, other.token_ids)
    tie = next((step for step, gap in enumerate(off.logit_gaps) if gap < TIE_EPSILON), None)
    if tie is not None and tie <= first_difference:
        return Sameness(same=True, how=f"identical up to a tie at token {tie + 1}")
    return Sameness(same=False, how=f"differs at token {first_difference + 1}")


def find_problems(rows: Sequence[Row]) -> list[str]:
    """A sentence for each promise that was not kept; empty when all were."""
    by_case = {row.case: row for row in rows}
    problems = [
        f"{row.case}: the output {row.sameness.how} from the one without the store"
        for row in rows
        if not row.sameness.same
    ]
    problems += [f"{case}: did not run" for case in CASES if case not in by_case]
    if "cold_a" not in by_case:
        return problems
    cold = by_case["cold_a"].answer
    if cold.prefilled_tokens < cold.prompt_tokens:
        problems.append(
            f"cold_a: computed {cold.prefilled_tokens} of {cold.prompt_tokens} prompt tokens, so it was not cold"
        )
    for case, ratio, where, part in (
        ("warm_b", MAX_TTFT_RATIO, "with the document in the store", "a tenth"),
        ("sidecar_killed", MAX_KILLED_TTFT_RATIO, "after kill -9 of the sidecar", "a fifth"),
    ):
        if case in by_case and (ttft_s := by_case[case].answer.ttft_s) > ratio * cold.ttft_s:
            problems.append(
                f"{case}: B's first token took {ttft_s:.2f} s {where}, more than {part} of the {cold.ttft_s:.2f} s A needed "
                "to compute it"
            )
    return problems


def as_json(row: Row, rows: Sequence[Row]) -> dict[str, object]:
    """One row for scripts; `ttft_ratio` is against cold_a."""
    answer = row.answer
    cold_s = next((other.answer.ttft_s for other in rows if other.case == "cold_a"), None)
    return {
        "case": row.case,
        "ttft_s": answer.ttft_s,
        "prompt_tokens": answer.prompt_tokens,
        "prefilled_tokens": answer.prefilled_tokens,
        "fetched_tokens": answer.fetched_tokens,
        "same_output": row.sameness.same,
        "same_output_how": row.sameness.how,
        "local_cached_tokens": answer.local_cached_tokens,
        "fetched_bytes": answer.fetched_bytes,
        "saved_bytes": row.saved_bytes,
        "moved_bytes": row.moved_bytes,
        "ttft_ratio": answer.ttft_s / cold_s if cold_s else None,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
    }


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((step for step in range(shorter) if left[step] != right[step]), shorter)
