"""What the cluster's demo fails on."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from kvstore.demo.cluster_outcome import CASES, COMPUTED, DIRECTORY_CASES, PEER, ClusterRow, as_json, find_problems
from kvstore.demo.cluster_run import ClusterResult
from kvstore.demo.cluster_table import make_table
from kvstore.demo.outcome import Answer, Sameness

ALL = (*CASES, *DIRECTORY_CASES)
TOKENS = 1500
REUSABLE = 93


def answer(*, fetched_blocks: int, ttft_s: float) -> Answer:
    return Answer(
        ttft_s=ttft_s,
        prompt_tokens=TOKENS,
        prefilled_tokens=TOKENS - 16 * fetched_blocks,
        local_cached_tokens=0,
        fetched_tokens=16 * fetched_blocks,
        fetched_bytes=1000 * fetched_blocks,
        token_ids=(1, 2),
        logit_gaps=(1.0, 1.0),
        text="text",
        namespace="00",
        keys="",
    )


def rows() -> dict[str, ClusterRow]:
    """A run in which all went well."""
    made = {}
    for case in ALL:
        blocks = REUSABLE if case.source == PEER else 0
        made[case.name] = ClusterRow(
            case=case,
            answer=answer(fetched_blocks=blocks, ttft_s=0.2 if blocks else 4.0),
            tiers=(("peer", REUSABLE),) if blocks or case.name == "lost_2" else (),
            outcome="loaded" if blocks else "failed" if case.name == "lost_2" else "recompute",
            words="",
            peer_blocks=blocks,
            failed_blocks=REUSABLE if case.name == "lost_2" else 0,
            sameness=Sameness(same=True, how="identical"),
        )
    return made


def problems(**changes: ClusterRow) -> list[str]:
    return find_problems(list((rows() | changes).values()), ALL)


def changed(name: str, **fields: object) -> ClusterRow:
    row = rows()[name]
    of_answer = {key: fields.pop(key) for key in list(fields) if hasattr(row.answer, key)}
    return dataclasses.replace(row, answer=dataclasses.replace(row.answer, **of_answer), **fields)


def test_a_run_in_which_all_went_well_has_no_problems() -> None:
    assert problems() == []


def test_a_case_that_did_not_run_is_named() -> None:
    made = rows()
    del made["healed_3"]

    assert find_problems(list(made.values()), ALL) == ["healed_3: did not run"]
    assert find_problems(list(made.values()), CASES) == []


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("peer_2", {"sameness": Sameness(same=False, how="differs at token 2")}, "differs at token 2"),
        ("peer_3", {"peer_blocks": 80}, "80 blocks came over the data link"),
        ("peer_3", {"tiers": (("pinned", REUSABLE),)}, "explain has blocks in {'pinned': 93}"),
        ("healed_3", {"prefilled_tokens": 700}, "700 of 1500 tokens were computed"),
        ("survivor_3", {"local_cached_tokens": 1488}, "1488 tokens were in the engine's own pool"),
        ("lost_2", {"fetched_tokens": 1488}, "1488 tokens came from the store"),
        ("peer_2", {"ttft_s": 3.0}, "first token after 3.00 s, more than 0.5 of the 4.00 s of cold_1"),
        ("lost_2", {"ttft_s": 9.0}, "more than 2.0 of the 4.00 s of other_1"),
    ],
)
def test_what_is_not_as_it_must_be_is_told(name: str, fields: dict[str, object], words: str) -> None:
    (problem,) = problems(**{name: changed(name, **fields)})

    assert problem.startswith(f"{name}: ")
    assert words in problem


def test_a_chunk_at_the_front_of_a_late_load_is_no_problem() -> None:
    assert problems(peer_2=changed("peer_2", prefilled_tokens=524, fetched_tokens=976)) == []


def test_short_prompts_are_not_timed() -> None:
    short = changed("lost_2", prompt_tokens=400, prefilled_tokens=400, ttft_s=9.0)

    assert problems(lost_2=short) == []


def test_a_row_says_where_its_blocks_came_from() -> None:
    made = rows()

    assert made["peer_2"].source == "93 peer"
    assert made["cold_1"].source == COMPUTED
    assert made["lost_2"].source == "93 failed"


def test_rows_are_json_and_a_table() -> None:
    made = list(rows().values())
    text = io.StringIO()

    encoded = json.loads(json.dumps([as_json(row, made) for row in made]))
    Console(file=text, width=100).print(make_table(ClusterResult(tuple(made), ALL, "")))

    assert [row["case"] for row in encoded] == [case.name for case in ALL]
    assert encoded[1]["ttft_ratio"] == pytest.approx(0.05)
    for case in ALL:
        assert case.text in text.getvalue()
