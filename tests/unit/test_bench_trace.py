"""Mooncake's format: equal hash ids are equal text; a wrong line is named."""

import gzip
import json
from pathlib import Path

import pytest

from kvstore.bench.prompts import make_text, num_tokens
from kvstore.bench.trace import read_trace
from kvstore.core.errors import ConfigError

GOOD = {"timestamp": 1000, "input_length": 20, "output_length": 5, "hash_ids": [1, 2, 3]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_equal_hash_ids_are_equal_blocks_and_the_last_one_is_cut(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl", GOOD, GOOD | {"input_length": 24, "hash_ids": [1, 2, 9]}, GOOD | {"input_length": 22}
    )
    texts = [
        make_text(0, entry.turns[0].question).split()
        for entry in read_trace(file, seed=0, block_tokens=8).conversations
    ]

    assert [len(words) for words in texts] == [20, 24, 22]
    assert texts[0][:16] == texts[1][:16]
    assert texts[0][16:20] != texts[1][16:20]
    assert texts[2][:20] == texts[0]


def test_times_start_at_zero_in_order_and_are_scaled(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", *(GOOD | {"timestamp": at, "output_length": at} for at in (3500, 500, 2500)))
    workload = read_trace(file, seed=0, block_tokens=8, time_scale=0.5)

    assert workload.offsets_s == (0.0, 1.0, 1.5)
    assert [entry.turns[0].output_tokens for entry in workload.conversations] == [500, 2500, 3500]


def test_a_gzipped_file_a_blank_line_and_a_limit(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.jsonl", GOOD, "", GOOD | {"output_length": 0}, "not reached")
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    workload = read_trace(packed, seed=0, limit=2, block_tokens=8)

    assert [entry.turns[0].output_tokens for entry in workload.conversations] == [5, 1]
    assert num_tokens(workload.conversations[0].turns[0].question) == 20


@pytest.mark.parametrize(
    ("line", "field", "right"),
    [
        ("{", "trace", "not JSON"),
        ("[1]", "line", "a JSON object"),
        ({"timestamp": 1}, "input_length", "all of"),
        (GOOD | {"timestamp": -1}, "timestamp", "milliseconds, 0 or more"),
        (GOOD | {"timestamp": True}, "timestamp", "milliseconds, 0 or more"),
        ('{"timestamp": NaN, "input_length": 8, "output_length": 1, "hash_ids": [1]}', "timestamp", "milliseconds"),
        (GOOD | {"input_length": 0}, "input_length", "1 or more"),
        (GOOD | {"input_length": 2.5}, "input_length", "whole number"),
        (GOOD | {"output_length": "5"}, "output_length", "0 or more"),
        (GOOD | {"hash_ids": [1, -2, 3]}, "hash_ids", "whole numbers"),
        (GOOD | {"hash_ids": 3}, "hash_ids", "a list"),
        (GOOD | {"hash_ids": [1, 2]}, "hash_ids", "use 3, one for each 8"),
    ],
)
def test_a_wrong_line_is_named_with_what_would_be_right(tmp_path: Path, line: object, field: str, right: str) -> None:
    with pytest.raises(ConfigError, match=right) as caught:
        read_trace(write(tmp_path / "t.jsonl", GOOD, line), seed=0, block_tokens=8)

    assert caught.value.fields["field"] == field
    assert "line 2" in caught.value.message


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe", b"\x1f\x8bbroken"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes | None) -> None:
    for name in ("t.jsonl", "t.jsonl.gz"):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)

        with pytest.raises(ConfigError) as caught:
            read_trace(file, seed=0)

        assert caught.value.fields["field"] == "trace"
