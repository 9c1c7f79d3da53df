"""What is asked depends on the seed alone, and equal pieces are equal text."""

import hashlib

import pytest

from kvstore.bench.prompts import Piece, make_text, make_token_ids, num_tokens
from kvstore.bench.words import WORDS
from kvstore.bench.workload import (
    Lengths,
    Span,
    Workload,
    asked_tokens,
    document_qa,
    multi_turn,
    random_prompts,
    rounds,
    shared_system,
)
from kvstore.core.errors import ConfigError

LENGTHS = Lengths(Span(5, 50), Span(2, 9))


def all_of_them(seed: int) -> list[Workload]:
    return [
        random_prompts(seed, requests=20, lengths=LENGTHS),
        shared_system(seed, requests=20, lengths=LENGTHS, system_tokens=30),
        multi_turn(seed, conversations=5, turns=4, lengths=LENGTHS, system_tokens=10, think_s=1.0),
        document_qa(seed, documents=4, document_tokens=100, questions=5, lengths=LENGTHS),
    ]


def test_the_words_are_five_hundred_and_twelve_different_ones() -> None:
    assert len(set(WORDS)) == len(WORDS) == 512
    assert all(word.isascii() and word.islower() for word in WORDS)


def test_a_piece_has_as_many_words_as_tokens_and_a_shorter_one_is_its_prefix() -> None:
    long, short = (make_text(7, [Piece(("hash_id", 3), size)]) for size in (512, 100))

    assert long.count(" ") == len(long.split()) == 512
    assert long.startswith(short)
    assert set(long.split()) <= set(WORDS)


def test_pieces_join_without_changing_one_another() -> None:
    one, other = Piece(("a",), 5), Piece(("b", 1), 6)

    assert make_text(1, [one, other]) == make_text(1, [one]) + make_text(1, [other])


@pytest.mark.parametrize(("seed", "name"), [(2, ("a", 1)), (1, ("a", 2)), (1, ("a", "1")), (1, ("a",))])
def test_another_seed_or_name_is_another_text(seed: int, name: tuple[str | int, ...]) -> None:
    assert make_text(seed, [Piece(name, 20)]) != make_text(1, [Piece(("a", 1), 20)])


def test_text_stays_what_it_is_from_version_to_version() -> None:
    """Reports of two versions can be compared only if the seed still means the same prompts."""
    text = make_text(0, [Piece(("system",), 1000)])

    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "03849a58984f0800"


def test_token_ids_are_in_their_range() -> None:
    ids = make_token_ids(1, [Piece(("a",), 2000)], first=100, last=109)

    assert set(ids) == set(range(100, 110))
    assert ids[:50] == make_token_ids(1, [Piece(("a",), 50)], first=100, last=109)


def test_the_same_seed_makes_the_same_workload_and_another_one_another() -> None:
    digests = [workload.digest() for workload in all_of_them(1)]

    assert digests == [workload.digest() for workload in all_of_them(1)]
    assert len({*digests, *(workload.digest() for workload in all_of_them(2))}) == 8


def test_every_workload_has_the_requests_and_lengths_that_were_asked_for() -> None:
    for workload in all_of_them(3):
        assert workload.num_requests == 20
        assert [conversation.index for conversation in workload.conversations] == list(
            range(len(workload.conversations))
        )
        for conversation in workload.conversations:
            for turn in conversation.turns:
                assert 5 <= turn.question[-1].num_tokens <= 50
                assert 2 <= turn.output_tokens <= 9


def test_drawn_lengths_reach_both_ends() -> None:
    workload = random_prompts(0, requests=300, lengths=Lengths(Span(5, 8), Span(2, 2)))

    assert {num_tokens(entry.turns[0].question) for entry in workload.conversations} == {5, 6, 7, 8}


def test_random_prompts_share_nothing_and_shared_ones_their_system_prompt() -> None:
    lone, shared = all_of_them(1)[:2]

    assert len({entry.turns[0].question[0].name for entry in lone.conversations}) == 20
    assert not any(entry.system for entry in lone.conversations)
    assert {entry.system for entry in shared.conversations} == {(Piece(("system",), 30),)}


def test_each_document_is_asked_about_equally_often_and_not_in_a_row() -> None:
    workload = document_qa(1, documents=4, document_tokens=100, questions=5, lengths=LENGTHS)
    documents = [entry.turns[0].question[0] for entry in workload.conversations]

    assert {document: documents.count(document) for document in set(documents)} == {
        Piece(("document", number), 100): 5 for number in range(4)
    }
    assert documents != sorted(documents)
    assert len({entry.turns[0].question[1].name for entry in workload.conversations}) == 20


def test_a_later_turn_carries_what_was_before_it() -> None:
    workload = multi_turn(
        1, conversations=1, turns=3, lengths=Lengths(Span(10, 10), Span(4, 4)), system_tokens=7, think_s=0.0
    )

    assert [asked_tokens(workload.conversations[0], turn) for turn in range(3)] == [17, 31, 45]


def test_think_times_are_exponential_and_never_before_the_first_turn() -> None:
    workload = multi_turn(1, conversations=100, turns=11, lengths=LENGTHS, system_tokens=0, think_s=2.0)
    thinking = [turn.think_s for entry in workload.conversations for turn in entry.turns[1:]]

    assert {entry.turns[0].think_s for entry in workload.conversations} == {0.0}
    assert sum(thinking) / len(thinking) == pytest.approx(2.0, rel=0.1)
    assert sum(value > 2.0 for value in thinking) / len(thinking) == pytest.approx(0.368, abs=0.05)


def test_rounds_are_all_conversations_in_order_and_nearly_equal() -> None:
    workload = random_prompts(0, requests=11, lengths=LENGTHS)
    parts = rounds(workload, 4)

    assert [entry for part in parts for entry in part] == list(workload.conversations)
    assert sorted(len(part) for part in parts) == [2, 3, 3, 3]


@pytest.mark.parametrize("count", [0, 12])
def test_rounds_that_would_be_empty_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="1 to 11") as caught:
        rounds(random_prompts(0, requests=11, lengths=LENGTHS), count)

    assert caught.value.fields == {"field": "rounds", "value": count}


def test_a_workload_that_would_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="1,000,000"):
        multi_turn(0, conversations=10**5, turns=11, lengths=LENGTHS, system_tokens=0, think_s=0)
