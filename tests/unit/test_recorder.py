"""What a sidecar writes down of its traffic, and how it is read again."""

import gzip
import json
import os
import random
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.keys import HashScheme, KVSpec, pack_keys
from kvstore.core.limits import MAX_QUEUED_RECORD_BYTES
from kvstore.eviction import make_policy
from kvstore.recorder import Recorder
from kvstore.replay.cache import ReplayCache
from kvstore.replay.capacity import read_capacity
from kvstore.replay.recording import read_recording, read_requests
from kvstore.replay.run import Found
from kvstore.replay.trace import Recorded, ReplayRequest, ReplayStore

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float16")
WIDE = KVSpec(
    weights="v",
    num_layers=3,
    num_kv_heads=2,
    head_dim=64,
    dtype="float16",
    block_tokens=32,
    hash=HashScheme(algorithm="sha256", block_tokens=32),
)
HEADER = {"arena_bytes": 1 << 24, "segment_bytes": 1 << 20, "eviction": "lru", "tenant_quota": 1.0}


def keys(numbers: range, spec: KVSpec = SPEC) -> bytes:
    return pack_keys(spec.hash.hash_blocks([7] * (numbers.stop * spec.block_tokens))[numbers.start :])


@contextmanager
def recording(path: Path, limit: int = 1 << 24) -> Iterator[Recorder]:
    recorder = Recorder(path, limit, HEADER)
    recorder.open()
    yield recorder
    assert recorder.close(10.0)


def some_traffic(recorder: Recorder, at_s: float = 100.0) -> None:
    """Ten blocks are asked for and stored, two more are generated, all twelve are asked for; another tenant's of another size."""
    namespace, other = SPEC.namespace("alice"), WIDE.namespace("bob")
    recorder.wanted(namespace, "alice", SPEC, keys(range(10)), at_s, num_tokens=165, num_had=0, num_found=0)
    recorder.stored(namespace, "alice", SPEC, b"", keys(range(10)), at_s + 0.25)
    recorder.stored(namespace, "alice", SPEC, keys(range(9, 10)), keys(range(10, 12)), at_s + 0.5)
    recorder.wanted(other, "bob", WIDE, keys(range(3), WIDE), at_s + 0.75, num_tokens=96, num_had=0, num_found=0)
    recorder.wanted(namespace, "alice", SPEC, keys(range(12)), at_s + 1.0, num_tokens=200, num_had=2, num_found=12)


def lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_requests_and_stores_are_a_line_each_behind_their_namespace(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with recording(path) as recorder:
        some_traffic(recorder)
    first, space, request, stored, generated, second_space, other, again = lines(path)

    assert first == {"kvstore_recording": 1, **HEADER}
    assert space == {"namespace": 0, "tenant": "t0", "block_tokens": 16, "block_bytes": SPEC.block_nbytes}
    assert second_space["tenant"] == "t1"
    assert (request["timestamp"], request["input_length"], request["found"]) == (0, 165, 0)
    assert stored["stored_ids"] == request["hash_ids"]
    assert stored["behind"] is None
    assert generated["behind"] == request["hash_ids"][-1]
    assert again["hash_ids"] == request["hash_ids"] + generated["stored_ids"]
    assert (again["timestamp"], again["found"]) == (1000, 12)
    assert other["namespace"] == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert recorder.counters()["recorded_lines_total"] == 8
    assert recorder.counters()["recorded_bytes_total"] <= path.stat().st_size


def test_nothing_in_it_tells_a_key_and_two_recordings_have_no_id_in_common(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        with recording(path) as recorder:
            some_traffic(recorder)
    text = paths[0].read_text()
    ids = [{one for line in lines(path) for one in line.get("hash_ids", [])} for path in paths]

    assert "alice" not in text
    assert "bob" not in text
    assert not ids[0] & ids[1]
    assert len(ids[0]) == 12 + 3
    assert max(ids[0]) < 1 << 53
    for key in SPEC.hash.hash_blocks([7] * 192):
        assert key.hex() not in text
        for piece in (key[:8], key[8:]):
            for order in ("little", "big"):
                assert not ids[0] & {int.from_bytes(piece, order) >> shift for shift in (0, 11)}


def test_it_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with recording(path) as recorder:
        some_traffic(recorder)
    trace = read_recording(path)
    request, stored, generated, other, again = trace.steps

    assert trace.num_blocks == 15
    assert trace.recorded is not None
    assert trace.recorded.eviction == "lru"
    assert isinstance(stored, ReplayStore)
    assert isinstance(generated, ReplayStore)
    assert (stored.behind, generated.behind) == (-1, request.blocks[-1])
    assert again.blocks == request.blocks + generated.blocks
    assert isinstance(again, ReplayRequest)
    assert (again.num_stored, again.num_had) == (12, 2)
    assert other.space.block_nbytes == WIDE.block_nbytes
    assert len(read_recording(path, limit=1).requests) == 1


def test_a_replay_stores_what_was_stored_and_what_was_found_when(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with recording(path) as recorder:
        some_traffic(recorder)
        recorder.wanted(
            SPEC.namespace("alice"), "alice", SPEC, keys(range(20, 24)), 102.0, num_tokens=64, num_had=0, num_found=4
        )
        recorder.wanted(
            SPEC.namespace("alice"), "alice", SPEC, keys(range(20, 24)), 103.0, num_tokens=64, num_had=0, num_found=4
        )
        recorder.stored(SPEC.namespace("bob"), "bob", SPEC, keys(range(1)), keys(range(1, 3)), 103.0)  # an orphan
        recorder.used(SPEC.namespace("alice"), "alice", SPEC, keys(range(12)), 104.0)  # so that others go first
        for start in (100, 158):  # 132 blocks in 128 slots
            recorder.stored(SPEC.namespace("bob"), "bob", SPEC, b"", keys(range(start, start + 58)), 105.0)
        recorder.wanted(
            SPEC.namespace("alice"), "alice", SPEC, keys(range(12)), 106.0, num_tokens=200, num_had=0, num_found=0
        )
        recorder.wanted(
            SPEC.namespace("alice"), "alice", SPEC, keys(range(20, 24)), 107.0, num_tokens=64, num_had=0, num_found=0
        )
    cache = ReplayCache(read_capacity("1MiB", "capacity", read_recording(path).recorded).slots(), make_policy("lru"))
    found: list[Found] = []
    for step in read_recording(path).steps:
        if isinstance(step, ReplayRequest):
            found.append(cache.replay(step))
        else:
            cache.follow(step)
        cache.check()

    assert [each.ram for each in found] == [0, 0, 12, 0, 4, 12, 0]


def test_a_file_that_is_there_is_kept_and_nothing_else_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for at_s in (1.0, 2.0, 3.0):
        with recording(path) as recorder:
            some_traffic(recorder, at_s)
    assert len(lines(path)) == len(lines(tmp_path / "t.jsonl.before")) == 8
    assert len(list(tmp_path.iterdir())) == 2

    for wrong in (tmp_path, Path("/dev/null"), tmp_path / "absent" / "t.jsonl"):
        with pytest.raises(ConfigError) as caught:
            Recorder(wrong, 1 << 20, HEADER).open()
        assert caught.value.fields["field"] == "record"
    assert Path("/dev/null").is_char_device()


def test_a_file_that_another_sidecar_writes_is_left_alone_and_an_empty_one_is_not_kept(tmp_path: Path) -> None:
    path, before = tmp_path / "t.jsonl", tmp_path / "t.jsonl.before"
    before.write_text("a good one")
    with recording(path) as recorder:
        some_traffic(recorder)
        with pytest.raises(ConfigError, match="another sidecar records there"):
            Recorder(path, 1 << 20, HEADER).open()
    assert len(read_recording(path).requests) == 3

    path.write_bytes(b"")  # the disk was full
    with recording(path) as recorder:
        some_traffic(recorder)
    assert before.read_text() == "a good one"


def test_it_ends_at_its_limit_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with recording(path, limit=1 << 16) as recorder:
        for turn in range(2000):
            some_traffic(recorder, 100.0 + turn)
            if turn % 100 == 99:
                time.sleep(0.01)
        wait_until(lambda: path.stat().st_size > 1 << 16)
    size = path.stat().st_size
    some_traffic(recorder)

    assert 1 << 16 <= size < 3 << 16
    assert path.stat().st_size == size
    assert len(read_recording(path).requests) > 100


def test_what_the_queue_or_the_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    namespace = SPEC.namespace("")
    with recording(path) as recorder:
        recorder.wanted(
            namespace, "", SPEC, bytes(MAX_QUEUED_RECORD_BYTES), 1.0, num_tokens=1 << 24, num_had=0, num_found=0
        )
        assert recorder.counters()["dropped_records_total"] == 1

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, old[1]))  # the disk is full there
    try:
        with recording(path) as recorder:
            for turn in range(1500):
                some_traffic(recorder, float(turn))
            wait_until(lambda: not recorder._running)
            before = recorder.counters()["dropped_records_total"]
            some_traffic(recorder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    counters = recorder.counters()
    assert counters["dropped_records_total"] == before + 5
    assert counters["recorded_lines_total"] + counters["dropped_records_total"] == 1500 * 5 + 5 + 3
    assert len(read_recording(path).requests) > 100


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_one_that_was_cut_off_anywhere_is_read_to_its_last_whole_line(tmp_path: Path, name: str) -> None:
    path, cut = tmp_path / name, tmp_path / f"cut-{name}"
    with recording(path) as recorder:
        for turn in range(30):
            some_traffic(recorder, float(turn))
    whole, draw = path.read_bytes(), random.Random(3)
    steps = read_recording(path).steps

    for end in sorted(draw.sample(range(len(whole) // 2, len(whole)), 40)):
        cut.write_bytes(whole[:end])
        found = read_recording(cut).steps
        assert found == steps[: len(found)]
        assert found
    assert read_recording(cut).steps  # nearly whole


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"kvstore_recording": 2}, "kvstore_recording"),
        ({"namespace": 2, "tenant": "t", "block_tokens": 16, "block_bytes": 9}, "namespace"),
        ({"namespace": 1, "tenant": "t", "block_tokens": 0, "block_bytes": 9}, "block_tokens"),
        ({"timestamp": 1, "input_length": 16, "hash_ids": [1], "namespace": 1, "found": 0, "had": 0}, "namespace"),
        ({"timestamp": 1, "input_length": 15, "hash_ids": [1], "namespace": 0, "found": 0, "had": 0}, "hash_ids"),
        ({"timestamp": 1, "input_length": 16, "hash_ids": ["a"], "namespace": 0, "found": 0, "had": 0}, "hash_ids"),
        ({"timestamp": 1, "input_length": 16, "hash_ids": [1], "namespace": 0}, "found"),
        ({"timestamp": 1, "stored_ids": [1.5], "namespace": 0}, "stored_ids"),
        ({"timestamp": 1, "stored_ids": [1], "behind": "x", "namespace": 0}, "behind"),
        ({"timestamp": -1, "stored_ids": [1], "namespace": 0}, "timestamp"),
        ({"namespace": 1, "tenant": "t", "block_tokens": 1 << 40, "block_bytes": 9}, "block_tokens"),
        ({"namespace": 1, "tenant": "t", "block_tokens": 16, "block_bytes": (1 << 20) + 1}, "block_bytes"),
        ({**HEADER, "kvstore_recording": 1, "tenant_quota": 0}, "tenant_quota"),
        ({**HEADER, "kvstore_recording": 1, "tenant_quota": 5}, "tenant_quota"),
        ({**HEADER, "kvstore_recording": 1, "eviction": ""}, "eviction"),
        ({**HEADER, "kvstore_recording": 1, "eviction": ["lru"]}, "eviction"),
        ({**HEADER, "kvstore_recording": 1, "segment_bytes": 3}, "segment_bytes"),
        ({**HEADER, "kvstore_recording": 1, "arena_bytes": 1}, "arena_bytes"),
        ({**HEADER, "kvstore_recording": 1, "arena_bytes": 1 << 60}, "arena_bytes"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: dict[str, Any], field: str) -> None:
    path = tmp_path / "t.jsonl"
    with recording(path) as recorder:
        recorder.wanted(SPEC.namespace(""), "", SPEC, keys(range(1)), 0.0, num_tokens=16, num_had=0, num_found=0)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")

    with pytest.raises(ConfigError) as caught:
        read_recording(path)

    assert caught.value.fields["field"] == field
    assert "line 4" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"timestamp": 0, "input_length": 1, "hash_ids": []}\n\xff\xfe\n', "line 2: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"timestamp": "\\u001b[2J"}\n', "line 1: input_length"),
        (gzip.compress(b"{}\n" * 100)[:10] + b"\xff" * 99, "cannot be read"),
        (None, "it is no file"),
    ],
)
def test_a_file_of_anything_else_is_refused_in_words(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "anything"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        read_requests(path, block_tokens=16)

    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["999999TiB", "9" * 30 + "TiB"])
def test_a_capacity_beyond_any_machine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use at most 16777216 segments"):
        read_capacity(text, "capacity", Recorded(1 << 24, 1 << 20, "lru", 1.0))


def test_an_id_twice_in_a_line_is_one_block(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    twice = keys(range(1)) * 2
    with recording(path) as recorder:
        recorder.wanted(SPEC.namespace(""), "", SPEC, twice, 0.0, num_tokens=32, num_had=0, num_found=2)
        recorder.used(SPEC.namespace(""), "", SPEC, twice, 1.0)

    assert [step.blocks for step in read_recording(path).steps] == [[0], [0]]


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)
