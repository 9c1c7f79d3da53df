"""Requests to replay: a trace in Mooncake's format (kvstore/bench/trace.py), or what the sidecar recorded, which has that format.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "hash_ids")


class ReplayRequest(NamedTuple):
    """One prompt."""

    at_s: float
    num_tokens: int
    blocks: list[int]  # numbers of the trace's blocks: a block is its id behind all before it
    tenant: str


class Trace(NamedTuple):
    """Requests in their order."""

    requests: list[ReplayRequest]
    block_tokens: int
    num_blocks: int  # distinct

    @property
    def num_references(self) -> int:
        """Blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS, limit: int = 0, full_blocks: bool = False) -> Trace:
    """All requests, or the first `limit`, in the order of the file, as the published figures have it. `full_blocks`: without the
    last block of a prompt that does not fill it. Raises ConfigError that names the line and the field."""
    numbers: dict[tuple[int, Any], int] = {}  # by the block before it (-1: none) and the id
    requests: list[ReplayRequest] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        at_s, num_tokens, ids, tenant = _parse(line, f"trace {path}, line {number}", block_tokens)
        if full_blocks:
            ids = ids[: num_tokens // block_tokens]
        blocks: list[int] = []
        before = -1
        for one in ids:
            before = numbers.setdefault((before, one), len(numbers))
            blocks.append(before)
        requests.append(ReplayRequest(at_s, num_tokens, blocks, tenant))
        if len(requests) == limit:
            break
    if not requests:
        raise ConfigError(
            f"trace {path}: no requests; use a file with one JSON object a line", field="trace", value=str(path)
        )
    return Trace(requests, block_tokens, len(numbers))


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError) as err:
        raise ConfigError(f"trace {path}: cannot be read: {err}", field="trace", value=str(path)) from err


def _parse(line: str, where: str, block_tokens: int) -> tuple[float, int, list[Any], str]:
    try:
        entry = json.loads(line)
    except ValueError as err:
        raise ConfigError(f"{where}: not JSON ({err}): {line[:60]!r}", field="trace", value=line[:60]) from err
    if not isinstance(entry, dict):
        raise _wrong(where, "line", entry, f"a JSON object with {', '.join(_FIELDS)}")
    for field in _FIELDS:
        if field not in entry:
            raise _wrong(where, field, "absent", f"all of {', '.join(_FIELDS)}")
    timestamp, length, ids = (entry[field] for field in _FIELDS)
    tenant = entry.get("tenant", "")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise _wrong(where, "timestamp", timestamp, "milliseconds, 0 or more")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise _wrong(where, "input_length", length, "a whole number of tokens, 1 or more")
    if not isinstance(ids, list) or not all(isinstance(one, int | str) and not isinstance(one, bool) for one in ids):
        raise _wrong(where, "hash_ids", ids, "a list of whole numbers, or of strings")
    if not isinstance(tenant, str):
        raise _wrong(where, "tenant", tenant, "a string")
    if len(ids) > -(-length // block_tokens):
        most = f"at most {-(-length // block_tokens)}, one for each {block_tokens} tokens begun (or another --block-tokens)"
        raise _wrong(where, "hash_ids", f"{len(ids)} ids for {length} tokens", most)
    return timestamp / 1000, length, ids, tenant


def _wrong(where: str, field: str, value: Any, right: str) -> ConfigError:
    shown = str(value)[:60]
    return ConfigError(f"{where}: {field} is {shown}; use {right}", field=field, value=shown)
