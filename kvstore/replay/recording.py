"""What a sidecar recorded (kvstore/recorder.py has the format), as requests to replay."""

from pathlib import Path
from typing import Any

from kvstore.core.blocks import slot_nbytes
from kvstore.core.errors import ConfigError
from kvstore.core.limits import SEGMENT_BYTES, SLOT_ALIGN_BYTES
from kvstore.recorder import FORMAT, HEADER
from kvstore.replay.capacity import MAX_SEGMENTS
from kvstore.replay.trace import (
    Recorded,
    ReplayRequest,
    ReplayStep,
    ReplayStore,
    ReplayUse,
    Space,
    Trace,
    check_number,
    check_whole,
    json_lines,
    read_trace,
    wrong,
)

_WHOLE = "a whole number, 0 or more"
_COUNT = "a whole number, 1 or more"
_QUOTA = "a part, above 0 and at most 1"
_MAX_BLOCK_TOKENS = 4096  # as in KVSpec


def read_requests(path: Path, *, block_tokens: int, limit: int = 0, full_blocks: bool = False) -> Trace:
    """A recording if its first line says that it is one, else a trace; of a recording `limit` alone matters. Raises
    ConfigError."""
    _, first = next(json_lines(path, may_end_anywhere=True), ("", {}))
    if HEADER in first:
        return read_recording(path, limit=limit)
    return read_trace(path, block_tokens=block_tokens, limit=limit, full_blocks=full_blocks)


def read_recording(path: Path, *, limit: int = 0) -> Trace:
    """Its first `limit` requests, 0: all, and what was stored until then. One that was cut off ends with its last whole line."""
    reader = _Reader()
    for where, entry in json_lines(path, may_end_anywhere=True):
        reader.read(where, entry)
        if reader.num_requests == limit > 0:
            break
    if not reader.num_requests:
        raise ConfigError(f"trace {path}: no requests were recorded", field="trace", value=str(path))
    return Trace(reader.steps, len(reader.numbers), reader.recorded)


class _Reader:
    """Lines one after the other."""

    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.steps: list[ReplayStep] = []
        self.numbers: dict[tuple[int, int], int] = {}  # by space and id
        self.num_requests = 0
        self._spaces: list[Space] = []

    def read(self, where: str, entry: dict[str, Any]) -> None:
        """One line."""
        if HEADER in entry:
            self.recorded = _header(where, entry)
        elif "block_tokens" in entry:
            segment = self.recorded.segment_bytes if self.recorded else SEGMENT_BYTES
            self._spaces.append(_space(where, entry, len(self._spaces), segment))
        else:
            self._step(where, entry)

    def _step(self, where: str, entry: dict[str, Any]) -> None:
        at_s = check_number(where, entry, "timestamp", 0, "milliseconds, 0 or more") / 1000
        number = check_whole(where, entry, "namespace", 0, _WHOLE)
        if number >= len(self._spaces):
            raise wrong(where, "namespace", number, f"one of the {len(self._spaces)} that were named before")
        space = self._spaces[number]
        if "stored_ids" in entry:
            behind = -1 if entry.get("behind") is None else check_whole(where, entry, "behind", 0, _WHOLE)
            blocks = self._blocks(where, entry, "stored_ids", space)
            self.steps.append(ReplayStore(at_s, blocks, space, -1 if behind < 0 else self._number(space, behind)))
            return
        if "used_ids" in entry:
            self.steps.append(ReplayUse(at_s, self._blocks(where, entry, "used_ids", space), space))
            return
        num_tokens = check_whole(where, entry, "input_length", 1, "a whole number of tokens, 1 or more")
        blocks = self._blocks(where, entry, "hash_ids", space)
        if len(blocks) * space.block_tokens > num_tokens:
            most = f"at most {num_tokens // space.block_tokens}, one for each {space.block_tokens} tokens"
            raise wrong(where, "hash_ids", f"{len(blocks)} ids for {num_tokens} tokens", most)
        found, had = (min(len(blocks), check_whole(where, entry, name, 0, _WHOLE)) for name in ("found", "had"))
        self.steps.append(ReplayRequest(at_s, num_tokens, blocks, space, found, had))
        self.num_requests += 1

    def _blocks(self, where: str, entry: dict[str, Any], field: str, space: Space) -> list[int]:
        """Each once: a client may have asked for one twice."""
        ids = entry.get(field, "absent")
        if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise wrong(where, field, ids, "a list of whole numbers")
        return [self._number(space, one) for one in dict.fromkeys(ids)]

    def _number(self, space: Space, one: int) -> int:
        """An id names a block with all before it."""
        return self.numbers.setdefault((space.number, one), len(self.numbers))


def _header(where: str, entry: dict[str, Any]) -> Recorded:
    if entry[HEADER] != FORMAT:
        raise wrong(where, HEADER, entry[HEADER], f"{FORMAT}, the format that this version reads")
    quota = check_number(where, entry, "tenant_quota", 0, _QUOTA)
    if not 0 < quota <= 1:
        raise wrong(where, "tenant_quota", quota, _QUOTA)
    arena, segment = (
        check_whole(where, entry, f"{name}_bytes", 1, "bytes, 1 or more") for name in ("arena", "segment")
    )
    if segment % SLOT_ALIGN_BYTES:
        raise wrong(where, "segment_bytes", segment, f"a multiple of {SLOT_ALIGN_BYTES}")
    if arena % segment or arena // segment > MAX_SEGMENTS:
        raise wrong(where, "arena_bytes", arena, f"1 to {MAX_SEGMENTS} segments of {segment} bytes")
    eviction = entry.get("eviction", "absent")
    if not isinstance(eviction, str) or not eviction:
        raise wrong(where, "eviction", eviction, "the name of a policy")
    return Recorded(arena, segment, eviction, quota)


def _space(where: str, entry: dict[str, Any], number: int, segment_bytes: int) -> Space:
    if check_whole(where, entry, "namespace", 0, _WHOLE) != number:
        raise wrong(where, "namespace", entry["namespace"], f"{number}: they are numbered in their order")
    tokens, nbytes = (check_whole(where, entry, name, 1, _COUNT) for name in ("block_tokens", "block_bytes"))
    if tokens > _MAX_BLOCK_TOKENS:
        raise wrong(where, "block_tokens", tokens, f"1 to {_MAX_BLOCK_TOKENS}")
    if slot_nbytes(nbytes) > segment_bytes:
        raise wrong(where, "block_bytes", nbytes, f"at most a segment, {segment_bytes}")
    return Space(number, str(entry.get("tenant", "")), tokens, nbytes)
