"""Requests to replay, and a trace of them in Mooncake's format (as kvstore/bench/trace.py); recordings: recording.py.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError

BLOCK_TOKENS = 512
"""What a hash id stands for in the published traces."""

_FIELDS = ("timestamp", "input_length", "hash_ids")
_GZIP_MAGIC = b"\x1f\x8b"
_BEYOND = 1 << 62  # of any number


class Space(NamedTuple):
    """Blocks that requests may share: a namespace of a recording, or a tenant of a trace."""

    number: int
    tenant: str
    block_tokens: int
    block_nbytes: int = 0  # 0: a trace does not say


class ReplayRequest(NamedTuple):
    """One prompt."""

    at_s: float
    num_tokens: int
    blocks: list[int]  # numbers of the trace's blocks: a block is its id behind all before it
    space: Space
    num_stored: int  # leading blocks that are stored at once if they are missing; others when a ReplayStore says so
    num_had: int = 0  # leading blocks that its engine had itself


class ReplayStore(NamedTuple):
    """Blocks that an engine stored, behind the block `behind` (-1: they are the first of their sequence)."""

    at_s: float
    blocks: list[int]
    space: Space
    behind: int


class ReplayUse(NamedTuple):
    """Blocks of a further layer group that a request read."""

    at_s: float
    blocks: list[int]
    space: Space


class Recorded(NamedTuple):
    """The sidecar that made a recording."""

    arena_bytes: int
    segment_bytes: int
    eviction: str
    tenant_quota: float


class Trace(NamedTuple):
    """Requests in their order; in a recording, also what was stored and used between them."""

    steps: "list[ReplayStep]"
    num_blocks: int  # distinct
    recorded: Recorded | None = None

    @property
    def requests(self) -> list[ReplayRequest]:
        """Without what is between them."""
        return [step for step in self.steps if isinstance(step, ReplayRequest)]

    @property
    def num_references(self) -> int:
        """Blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)


ReplayStep = ReplayRequest | ReplayStore | ReplayUse


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS, limit: int = 0, full_blocks: bool = False) -> Trace:
    """All requests, or the first `limit`, in the order of the file, as the published figures have it. `full_blocks`: without the
    last block of a prompt that does not fill it. Raises ConfigError that names the line and the field."""
    numbers: dict[tuple[int, Any], int] = {}  # by the block before it (-1: none) and the id
    spaces: dict[str, Space] = {}
    steps: list[ReplayStep] = []
    for where, entry in json_lines(path):
        at_s, num_tokens, ids, tenant = _parse(entry, where, block_tokens)
        if full_blocks:
            ids = ids[: num_tokens // block_tokens]
        blocks: list[int] = []
        before = -1
        for one in ids:
            before = numbers.setdefault((before, one), len(numbers))
            blocks.append(before)
        space = spaces.setdefault(tenant, Space(len(spaces), tenant, block_tokens))
        steps.append(ReplayRequest(at_s, num_tokens, blocks, space, len(blocks)))
        if len(steps) == limit:
            break
    if not steps:
        raise ConfigError(
            f"trace {path}: no requests; use a file with one JSON object a line", field="trace", value=str(path)
        )
    return Trace(steps, len(numbers))


def json_lines(path: Path, *, may_end_anywhere: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a file with one a line, packed or not, each with its place in words. `may_end_anywhere`: whoever wrote it may
    have been killed, or writes it still: what is not whole is its end. Raises ConfigError."""
    number = 0
    if path.exists() and not path.is_file():
        raise _unreadable(path, number, "it is no file; write what comes out of a pipe to one")
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if may_end_anywhere and not line.endswith(b"\n"):
                    return
                if line.strip():
                    where = f"trace {path}, line {number}"
                    yield where, _read_object(line, where)
    except EOFError as err:
        if not may_end_anywhere:
            raise _unreadable(path, number, err) from err
    except (OSError, zlib.error) as err:
        raise _unreadable(path, number, err) from err


def wrong(where: str, field: str, value: Any, right: str) -> ConfigError:
    """What to raise of a field in a line."""
    shown = str(value)[:60]
    shown = shown if shown.isprintable() else ascii(shown)
    return ConfigError(f"{where}: {field} is {shown}; use {right}", field=field, value=shown)


def check_number(where: str, entry: dict[str, Any], field: str, low: float, right: str) -> float:
    """A number of an object, or ConfigError."""
    value = entry.get(field, "absent")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < _BEYOND:
        raise wrong(where, field, value, right)
    return value


def check_whole(where: str, entry: dict[str, Any], field: str, low: int, right: str) -> int:
    """Likewise, a whole one."""
    value = check_number(where, entry, field, low, right)
    if not isinstance(value, int):
        raise wrong(where, field, value, right)
    return value


def _unreadable(path: Path, number: int, err: Exception | str) -> ConfigError:
    behind = f" behind line {number}" if number else ""
    return ConfigError(f"trace {path}: cannot be read{behind}: {err}", field="trace", value=str(path))


def _read_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError) as err:  # not UTF-8, not JSON, or nested without end
        shown = ascii(line[:60].decode(errors="replace"))
        raise ConfigError(f"{where}: not JSON ({err}): {shown}", field="trace", value=shown) from err
    if not isinstance(entry, dict):
        raise wrong(where, "line", entry, f"a JSON object with {', '.join(_FIELDS)}")
    return entry


def _parse(entry: dict[str, Any], where: str, block_tokens: int) -> tuple[float, int, list[Any], str]:
    for field in _FIELDS:
        if field not in entry:
            raise wrong(where, field, "absent", f"all of {', '.join(_FIELDS)}")
    at_s = check_number(where, entry, "timestamp", 0, "milliseconds, 0 or more") / 1000
    length = check_whole(where, entry, "input_length", 1, "a whole number of tokens, 1 or more")
    ids = entry["hash_ids"]
    tenant = entry.get("tenant", "")
    if not isinstance(ids, list) or not all(isinstance(one, int | str) and not isinstance(one, bool) for one in ids):
        raise wrong(where, "hash_ids", ids, "a list of whole numbers, or of strings")
    if not isinstance(tenant, str):
        raise wrong(where, "tenant", tenant, "a string")
    if len(ids) > -(-length // block_tokens):
        most = f"at most {-(-length // block_tokens)}, one for each {block_tokens} tokens begun (or another --block-tokens)"
        raise wrong(where, "hash_ids", f"{len(ids)} ids for {length} tokens", most)
    return at_s, length, ids, tenant
