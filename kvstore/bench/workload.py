"""What is asked: conversations of one or more turns, each with its prompt and how many tokens are wanted.

random         every prompt new                               system | question i
shared-system  one system prompt before every question        system | question i
multi-turn     each turn sends the history, the answers included, and a new question
document-qa    few documents, many questions, shuffled        document d | question i
trace          a file's prompts (kvstore.bench.trace)
"""

import dataclasses
import hashlib
import math
from itertools import pairwise
from typing import NamedTuple

from kvstore.bench.prompts import Piece, Pieces, generator, num_tokens
from kvstore.core.errors import ConfigError

MAX_REQUESTS = 1_000_000
"""Requests of one run; their samples stay in memory until the report (some 1 KB each and 8 bytes a token)."""


class Span(NamedTuple):
    """A length in tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request. `think_s` passes between the answer before it and this question."""

    question: Pieces
    output_tokens: int
    think_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that wait for one another; `index` is its place in the workload."""

    index: int
    turns: tuple[Turn, ...]
    system: Pieces = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Everything that will be asked. `offsets_s` are the file's own times, of a trace only."""

    name: str
    seed: int
    conversations: tuple[Conversation, ...]
    offsets_s: tuple[float, ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests, if none fails."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    def digest(self) -> str:
        """Equal for equal requests in equal order: two reports with the same digest asked the same."""
        return hashlib.sha256(repr((self.seed, self.conversations)).encode()).hexdigest()[:16]


class Lengths(NamedTuple):
    """Of a question and of an answer."""

    question: Span
    output: Span


def random_prompts(seed: int, *, requests: int, lengths: Lengths) -> Workload:
    """Prompts that share nothing."""
    return Workload("random", seed, _singles(seed, requests, lengths, before=()))


def shared_system(seed: int, *, requests: int, lengths: Lengths, system_tokens: int) -> Workload:
    """One system prompt of `system_tokens`, then a question of its own for each request."""
    conversations = _singles(seed, requests, lengths, before=())
    system = (Piece(("system",), system_tokens),)
    return Workload("shared-system", seed, tuple(dataclasses.replace(entry, system=system) for entry in conversations))


def multi_turn(
    seed: int, *, conversations: int, turns: int, lengths: Lengths, system_tokens: int, think_s: float
) -> Workload:
    """Chats of `turns` turns each; think times are exponential around `think_s`."""
    _check_size(conversations * turns)
    draws = generator(seed, "lengths")
    system = (Piece(("system",), system_tokens),) if system_tokens else ()
    made = []
    for index in range(conversations):
        chat = tuple(
            Turn(
                question=(Piece(("question", index, turn), _between(draws.random(), lengths.question)),),
                output_tokens=_between(draws.random(), lengths.output),
                think_s=think_s * float(-_log1m(draws.random())) if turn else 0.0,
            )
            for turn in range(turns)
        )
        made.append(Conversation(index, chat, system))
    return Workload("multi-turn", seed, tuple(made))


def document_qa(seed: int, *, documents: int, document_tokens: int, questions: int, lengths: Lengths) -> Workload:
    """Each of `documents` is asked `questions` times, in an order shuffled over all of them."""
    _check_size(documents * questions)
    order = [document for document in range(documents) for _ in range(questions)]
    shuffle = generator(seed, "order")
    order = [document for _, _, document in sorted((shuffle.random(), at, entry) for at, entry in enumerate(order))]
    singles = _singles(seed, len(order), lengths, before=())
    made = []
    for single, document in zip(singles, order, strict=True):
        (turn,) = single.turns
        pieces = (Piece(("document", document), document_tokens), *turn.question)
        made.append(dataclasses.replace(single, turns=(dataclasses.replace(turn, question=pieces),)))
    return Workload("document-qa", seed, tuple(made))


def rounds(workload: Workload, count: int) -> list[tuple[Conversation, ...]]:
    """The conversations in `count` runs of nearly equal size, in order, none empty."""
    total = len(workload.conversations)
    if not 1 <= count <= total:
        raise ConfigError(
            f"rounds: {count}; use 1 to {total}, the number of conversations", field="rounds", value=count
        )
    edges = [total * number // count for number in range(count + 1)]
    return [workload.conversations[low:high] for low, high in pairwise(edges)]


def asked_tokens(conversation: Conversation, turn: int) -> int:
    """Length of a turn's prompt as asked: the answers so far count with the length that was wanted of them."""
    before = conversation.turns[:turn]
    history = sum(num_tokens(entry.question) + entry.output_tokens for entry in before)
    return num_tokens(conversation.system) + history + num_tokens(conversation.turns[turn].question)


def _singles(seed: int, requests: int, lengths: Lengths, *, before: Pieces) -> tuple[Conversation, ...]:
    _check_size(requests)
    draws = generator(seed, "lengths")
    made = []
    for index in range(requests):
        question = Piece(("question", index), _between(draws.random(), lengths.question))
        made.append(Conversation(index, (Turn((*before, question), _between(draws.random(), lengths.output)),)))
    return tuple(made)


def _between(draw: float, span: Span) -> int:
    return span.low + int(draw * (span.high - span.low + 1))


def _log1m(draw: float) -> float:
    return math.log1p(-draw)


def _check_size(requests: int) -> None:
    if not 1 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"requests: {requests}; use 1 to {MAX_REQUESTS:,}", field="requests", value=requests)
