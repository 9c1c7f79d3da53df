"""What the cluster's demo found: where each prompt's blocks came from, and whether that is what must be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.demo.outcome import Answer, Sameness

BLOCK_TOKENS = 16
OPENING_BLOCKS = 3
"""A chat's opening, which all documents have in common, has fewer full blocks than that. An engine has them in its pool."""

FRONT_TOKENS = 512
"""An engine computes a chunk at the front while a load that is late comes from the back; with other work beside, it may be."""

MIN_TIMED_TOKENS = 1000
"""Shorter prompts are computed in so few steps that other work on the machine decides how the times compare."""

MAX_PEER_TTFT_RATIO = 0.5
"""Time to first token with a document from another node, against node 1's when it computed it. A short document on a busy
machine; a long one is far below."""

MAX_LOST_TTFT_RATIO = 2.0
"""With a document whose only holder was just killed, against computing it without that. The failed question takes
milliseconds; two prefills on a shared machine may differ so much."""

COMPUTED, PEER = "computed", "peer"


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what must come of it."""

    name: str
    engine: int  # from 1 on, as its node
    document: int
    source: str  # COMPUTED or PEER
    text: str


CASES = (
    Case("cold_1", 1, 0, COMPUTED, "1: document 1, cold"),
    Case("peer_2", 2, 0, PEER, "2: document 1"),
    Case("peer_3", 3, 0, PEER, "3: document 1"),
    Case("other_1", 1, 1, COMPUTED, "1: document 2, cold"),
    Case("lost_2", 2, 1, COMPUTED, "2: document 2, 1 killed"),
    Case("survivor_3", 3, 1, PEER, "3: document 2"),
)
"""In the order in which they run."""

DIRECTORY_CASES = (
    Case("alone_1", 1, 2, COMPUTED, "1: document 3, no node"),
    Case("no_redis_2", 2, 2, COMPUTED, "2: document 3, no Redis"),
    Case("healed_3", 3, 2, PEER, "3: document 3, healed"),
)
"""Only with a directory server, after the others."""


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One case of the cluster's demo."""

    case: Case
    answer: Answer
    tiers: tuple[tuple[str, int], ...]  # where the plan found blocks, and how many (explain); () without a plan
    outcome: str  # of that plan; "" without one
    words: str  # what explain says of it
    peer_blocks: int  # that came over a data link during the case
    failed_blocks: int  # that were asked of another node and did not come
    sameness: Sameness  # against the first row of the same document, which was computed

    @property
    def source(self) -> str:
        """In words."""
        if self.outcome in {"loaded", "partly"}:
            return " + ".join(f"{num_blocks} {tier}" for tier, num_blocks in self.tiers)
        return f"{self.failed_blocks} failed" if self.failed_blocks else COMPUTED


def find_problems(rows: Sequence[ClusterRow], cases: Sequence[Case]) -> list[str]:
    """A sentence for each thing that is not what it must be; empty when all is."""
    by_name = {row.case.name: row for row in rows}
    problems = [f"{case.name}: did not run" for case in cases if case.name not in by_name]
    for row in rows:
        name = row.case.name
        if not row.sameness.same:
            problems.append(f"{name}: the output {row.sameness.how} from the one that was computed")
        problems += [f"{name}: {problem}" for problem in _source_problems(row)]
    return problems + _time_problems(by_name)


def as_json(row: ClusterRow, rows: Sequence[ClusterRow]) -> dict[str, object]:
    """One row for scripts; `ttft_ratio` is against cold_1."""
    answer = row.answer
    cold_s = next((other.answer.ttft_s for other in rows if other.case.name == "cold_1"), None)
    return {
        "case": row.case.name,
        "node": row.case.engine,
        "document": row.case.document,
        "ttft_s": answer.ttft_s,
        "ttft_ratio": answer.ttft_s / cold_s if cold_s else None,
        "prompt_tokens": answer.prompt_tokens,
        "prefilled_tokens": answer.prefilled_tokens,
        "local_cached_tokens": answer.local_cached_tokens,
        "fetched_tokens": answer.fetched_tokens,
        "fetched_bytes": answer.fetched_bytes,
        "tiers": dict(row.tiers),
        "plan_outcome": row.outcome,
        "explain": row.words,
        "peer_blocks": row.peer_blocks,
        "failed_blocks": row.failed_blocks,
        "same_output": row.sameness.same,
        "same_output_how": row.sameness.how,
        "token_ids": list(answer.token_ids),
        "text": answer.text,
    }


def _source_problems(row: ClusterRow) -> list[str]:
    answer = row.answer
    opening = OPENING_BLOCKS * BLOCK_TOKENS
    if answer.local_cached_tokens > opening:
        return [f"{answer.local_cached_tokens} tokens were in the engine's own pool, more than a chat's opening"]
    if row.case.source == COMPUTED:
        if answer.fetched_tokens > opening:
            return [f"{answer.fetched_tokens} tokens came from the store; nobody alive could have them"]
        return []
    wanted = (answer.prompt_tokens - 1) // BLOCK_TOKENS - OPENING_BLOCKS
    problems = []
    if row.peer_blocks < wanted:
        problems.append(f"{row.peer_blocks} blocks came over the data link, another node had {wanted} or more")
    if dict(row.tiers).get(PEER, 0) < wanted:
        problems.append(f"explain has blocks in {dict(row.tiers)}, another node had {wanted} or more")
    if answer.prefilled_tokens > answer.prompt_tokens - wanted * BLOCK_TOKENS + FRONT_TOKENS:
        problems.append(f"{answer.prefilled_tokens} of {answer.prompt_tokens} tokens were computed")
    return problems


def _time_problems(by_name: Mapping[str, ClusterRow]) -> list[str]:
    problems = []
    for name, against, ratio in (
        ("peer_2", "cold_1", MAX_PEER_TTFT_RATIO),
        ("peer_3", "cold_1", MAX_PEER_TTFT_RATIO),
        ("lost_2", "other_1", MAX_LOST_TTFT_RATIO),
    ):
        if name in by_name and against in by_name:
            ttft_s, cold_s = by_name[name].answer.ttft_s, by_name[against].answer.ttft_s
            if ttft_s > ratio * cold_s and by_name[name].answer.prompt_tokens >= MIN_TIMED_TOKENS:
                problems.append(
                    f"{name}: first token after {ttft_s:.2f} s, more than {ratio} of the {cold_s:.2f} s of {against}"
                )
    return problems
