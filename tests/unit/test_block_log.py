"""A follower that reads a log in any pieces ends with the set that the log stands for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import RemoteProtocolError
from kvstore.transport.block_log import (
    TAIL_RECORDS,
    BlockLog,
    Cursor,
    Head,
    LogChunk,
    fold,
    records_of,
    removed,
    stored,
)

EPOCH = 7


def prints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64) << np.uint64(1)


class Follower:
    """What kvstore/transport/snapshot.py does, with a set."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.held: set[int] = set()
        self.times_anew = 0

    def take(self, chunk: LogChunk) -> None:
        if chunk.at == chunk.head.start() and self.cursor.offset:
            self.held.clear()
            self.times_anew += 1
        updates = fold(records_of(chunk.records))
        self.held |= set((updates.stored >> np.uint64(1)).tolist())
        self.held -= set((updates.removed >> np.uint64(1)).tolist())
        self.cursor = chunk.after

    def catch_up(self, log: BlockLog, max_bytes: int) -> None:
        for _ in range(10_000):
            chunk = log.read(self.cursor, max_bytes)
            self.take(chunk)
            if chunk.is_last:
                return
        raise AssertionError("does not come to an end")


Step = tuple[str, list[int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "compact", "compact_earlier", "clear", "follow", "catch_up"]),
        st.lists(st.integers(1, 30), max_size=8),
    ),
    max_size=50,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, max_records=st.integers(1, 20))
def test_any_follower_ends_with_the_set(steps: list[Step], max_records: int) -> None:
    log, follower, held = BlockLog(EPOCH), Follower(), set[int]()

    for verb, numbers in steps:
        if verb == "store":
            log.append(stored(prints(*numbers)))
            held |= set(numbers)
        elif verb == "remove":
            log.append(removed(prints(*numbers)))
            held -= set(numbers)
        elif verb == "compact":
            log.compact()
        elif verb == "compact_earlier":
            log.compact(at=log.head.end // 2)
        elif verb == "clear":
            log.clear()
            held.clear()
        elif verb == "follow":
            follower.take(log.read(follower.cursor, 8 * max_records))
        else:
            follower.catch_up(log, 8 * max_records)
            assert follower.held == held
    follower.catch_up(log, 8 * max_records)

    assert follower.held == held


def test_who_is_up_to_date_reads_no_base_again() -> None:
    log, follower = BlockLog(EPOCH), Follower()
    log.append(stored(prints(*range(1, 1001))))
    follower.catch_up(log, 1 << 20)

    log.append(removed(prints(*range(1, 501))))
    follower.catch_up(log, 1 << 20)
    log.compact()
    chunk = log.read(follower.cursor, 1 << 20)

    assert chunk.records == b""
    assert chunk.after == Cursor(EPOCH, 2, 500)
    assert follower.times_anew == 0


def test_who_is_a_little_behind_reads_the_tail_of_the_generation_before() -> None:
    log, follower = BlockLog(EPOCH), Follower()
    log.append(stored(prints(*range(1, 1001))))
    follower.catch_up(log, 1 << 20)

    log.append(stored(prints(*range(2000, 2100))))
    log.compact()
    follower.catch_up(log, 1 << 20)

    assert follower.held == {*range(1, 1001), *range(2000, 2100)}
    assert follower.times_anew == 0


def test_who_is_far_behind_starts_anew() -> None:
    log, follower = BlockLog(EPOCH), Follower()
    log.append(stored(prints(1)))
    follower.catch_up(log, 1 << 20)

    log.append(stored(prints(*range(1, TAIL_RECORDS + 10))))
    log.compact()
    follower.catch_up(log, 1 << 20)

    assert len(follower.held) == TAIL_RECORDS + 9
    assert follower.times_anew == 1


def test_a_log_is_rewritten_before_most_of_it_is_void() -> None:
    log, numbers = BlockLog(EPOCH), prints(*range(1, 1001))
    compactions = 0

    for _ in range(200):
        log.append(np.concatenate([removed(numbers), stored(numbers)]))
        if log.is_long():
            log.compact()
            compactions += 1

    assert log.head.end <= 2 * 1000 + (1 << 16) + 2000
    assert 4 <= compactions <= 6
    assert log.num_blocks() == 1000


@pytest.mark.parametrize("cut", [1, 7, 9])
def test_half_a_record_is_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        records_of(bytes(16)[:cut])

    assert caught.value.fields == {"field": "records", "value": cut}


def test_cursors_of_another_life_start_anew() -> None:
    head = Head(EPOCH, 3, 10, 4, 8)

    assert head.next_for(Cursor(EPOCH - 1, 3, 5)) == Cursor(EPOCH, 3, 0)
    assert head.next_for(Cursor(EPOCH, 3, 9)) == Cursor(EPOCH, 3, 0)  # more than there is
    assert head.next_for(Cursor(EPOCH, 1, 10)) == Cursor(EPOCH, 3, 0)
