"""A trace file in Mooncake's format: one JSON object a line, as its open-source traces are published.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

timestamp is in milliseconds; one hash id stands for 512 tokens of the prompt (`block_tokens`), the last one for the rest; equal
ids are equal text with equal text before it. (Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving, section 4.)
Lines may be gzipped.
"""

from pathlib import Path
from typing import Any

from kvstore.bench.prompts import Piece, Pieces
from kvstore.bench.workload import MAX_REQUESTS, Conversation, Turn, Workload
from kvstore.core.errors import ConfigError
from kvstore.replay.trace import BLOCK_TOKENS, json_lines, wrong

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(
    path: Path, *, seed: int, limit: int = MAX_REQUESTS, block_tokens: int = BLOCK_TOKENS, time_scale: float = 1.0
) -> Workload:
    """The first `limit` requests, in order of their timestamps; times start at 0 and are multiplied by `time_scale`.

    Raises ConfigError that names the line and the field. An output_length of 0 asks for one token, the least a server takes.
    """
    found: list[tuple[float, Turn]] = []
    pieces: dict[Piece, Piece] = {}  # one object for each block: a trace has some 100 for each request
    for where, entry in json_lines(path):
        timestamp_ms, turn = _parse(entry, where, block_tokens)
        question = tuple(pieces.setdefault(piece, piece) for piece in turn.question)
        found.append((timestamp_ms, Turn(question, turn.output_tokens)))
        if len(found) == limit:
            break
    if not found:
        raise ConfigError(
            f"trace {path}: no requests; use a file with one JSON object a line", field="trace", value=str(path)
        )
    found.sort(key=lambda entry: entry[0])
    start_ms = found[0][0]
    conversations = tuple(Conversation(index, (turn,)) for index, (_, turn) in enumerate(found))
    return Workload("trace", seed, conversations, tuple((ms - start_ms) / 1000 * time_scale for ms, _ in found))


def _parse(entry: dict[str, Any], where: str, block_tokens: int) -> tuple[float, Turn]:
    for field in _FIELDS:
        if field not in entry:
            raise wrong(where, field, "absent", f"all of {', '.join(_FIELDS)}")
    timestamp, length, output, ids = (entry[field] for field in _FIELDS)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise wrong(where, "timestamp", timestamp, "milliseconds, 0 or more")
    if not _is_count(length) or length < 1:
        raise wrong(where, "input_length", length, "a whole number of tokens, 1 or more")
    if not _is_count(output):
        raise wrong(where, "output_length", output, "a whole number of tokens, 0 or more")
    if not isinstance(ids, list) or not all(_is_count(entry) for entry in ids):
        raise wrong(where, "hash_ids", ids, "a list of whole numbers, 0 or more")
    if len(ids) != -(-length // block_tokens):
        raise wrong(
            where,
            "hash_ids",
            f"{len(ids)} ids for {length} tokens",
            f"{-(-length // block_tokens)}, one for each {block_tokens} tokens begun (or another --trace-block-tokens)",
        )
    return float(timestamp), Turn(_pieces(ids, length, block_tokens), max(1, output))


def _pieces(ids: list[int], length: int, block_tokens: int) -> Pieces:
    lengths = [min(block_tokens, length - start) for start in range(0, length, block_tokens)]
    return tuple(Piece(("hash_id", one), size) for one, size in zip(ids, lengths, strict=True))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
