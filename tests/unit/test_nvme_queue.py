"""Which moves of a drive go next and together, and when a sick drive is tried again."""

import sys
from collections.abc import Callable
from types import FrameType

from faulty_file import PAGE

from kvstore.core.moves import BlockRecord, Move, MoveProblem, Urgency
from kvstore.tiers.nvme.gate import Gate
from kvstore.tiers.nvme.move_queue import MoveQueue, move_nbytes

READ, PREFETCH, WRITE = Urgency


def move(urgency: Urgency, page: int, nbytes: int = PAGE) -> Move:
    return Move(page, urgency, 0, BlockRecord(b"", b"", b"", page * PAGE, nbytes, 1, 0, 0, 0))


def pages(moves: list[Move]) -> list[int]:
    return [each.record.offset // PAGE for each in moves]


def take(queue: MoveQueue) -> list[int]:
    return pages(queue.take_reads() or queue.take_writes())


def test_a_move_brings_along_those_that_follow_it_on_the_drive():
    queue = MoveQueue(max_io_bytes=8 * PAGE)
    queue.push(move(READ, page) for page in (40, 41, 7, 42, 3))

    assert [take(queue) for _ in range(4)] == [[40, 41, 42], [7], [3], []]


def test_slots_of_other_sizes_and_tails_of_pages_are_neighbours_too():
    queue = MoveQueue(max_io_bytes=8 * PAGE)
    queue.push([move(WRITE, 0, 2 * PAGE - 1), move(WRITE, 3, PAGE), move(WRITE, 2, 1), move(WRITE, 5)])

    assert [take(queue) for _ in range(2)] == [[0, 2, 3], [5]]


def test_joining_ends_at_the_largest_io_and_a_larger_block_goes_alone():
    queue = MoveQueue(max_io_bytes=4 * PAGE)
    queue.push([move(READ, 0, 3 * PAGE), move(READ, 3, 2 * PAGE), move(READ, 5, 9 * PAGE), move(READ, 14)])

    assert [take(queue) for _ in range(4)] == [[0], [3], [5], [14]]


def test_no_io_has_so_many_moves_that_the_loop_waits_for_python():
    queue = MoveQueue(max_io_bytes=4096 * PAGE)
    queue.push(move(READ, page) for page in range(600))

    assert [len(take(queue)) for _ in range(3)] == [256, 256, 88]


def test_reads_come_before_prefetches_and_classes_are_not_joined():
    queue = MoveQueue()
    queue.push([move(WRITE, 0), move(PREFETCH, 1), move(READ, 2), move(WRITE, 4)])
    assert queue.has_reads
    assert queue.has_writes

    assert pages(queue.take_reads()) == [2]
    assert queue.has_reads
    assert pages(queue.take_reads()) == [1]
    assert not queue.has_reads
    assert queue.take_reads() == []
    assert pages(queue.take_writes()) == [0]
    assert pages(queue.clear()) == [4]
    assert not queue.has_writes


def test_what_is_asked_for_from_its_back_is_read_in_few_ios_too():
    queue = MoveQueue(max_io_bytes=3 * PAGE)
    queue.push(move(READ, page) for page in (47, 46, 45, 44, 43))
    queue.push([move(READ, 21, 2 * PAGE), move(READ, 20)])  # of another size: of another segment

    assert [take(queue) for _ in range(5)] == [[45, 46, 47], [43, 44], [21], [20], []]


def test_a_caller_may_want_less_at_once_but_never_more():
    queue = MoveQueue(max_io_bytes=3 * PAGE)
    queue.push(move(READ, page) for page in range(9))

    assert pages(queue.take_reads(2 * PAGE)) == [0, 1]
    assert pages(queue.take_reads(9 * PAGE)) == [2, 3, 4]
    assert pages(queue.take_reads(0)) == [5], "one at least"


def test_cancelled_reads_are_taken_out_of_both_classes_and_writes_stay():
    queue = MoveQueue(max_io_bytes=8 * PAGE)
    queue.push([*(move(READ, page) for page in (0, 1, 2, 3)), move(PREFETCH, 10), move(WRITE, 20)])

    cancelled = queue.cancel_reads(page * PAGE for page in (10, 2, 1, 2, 20, 30))

    assert pages(cancelled) == [10, 2, 1]
    assert [take(queue) for _ in range(4)] == [[0], [3], [20], []]
    queue.push([move(READ, 2)])
    assert take(queue) == [2], "the slot may be asked for again"


def test_hastened_prefetches_go_behind_the_reads_that_wait_and_before_those_that_come():
    queue = MoveQueue(max_io_bytes=8 * PAGE)
    queue.push([*(move(PREFETCH, page) for page in (10, 14, 12, 16)), move(READ, 0), move(WRITE, 20)])

    queue.hasten(page * PAGE for page in (16, 12, 0, 20, 30))
    queue.push([move(READ, 2)])

    taken = [queue.take_reads() for _ in range(6)]
    assert [pages(each) for each in taken] == [[0], [16], [12], [2], [10], [14]]
    assert [each[0].urgency for each in taken] == [READ] * 4 + [PREFETCH] * 2
    assert take(queue) == [20]


def test_each_verb_takes_the_same_time_for_a_move_however_many_wait():
    """Counted in steps of the interpreter, which no other load on the machine changes."""
    steps = [steps_of_a_round(num_waiting) for num_waiting in (100, 20_000)]

    assert steps[1] < 1.1 * steps[0]


def steps_of_a_round(num_waiting: int) -> int:
    queue = MoveQueue()
    queue.push(move(READ, 2 * page) for page in range(num_waiting))
    queue.push(move(PREFETCH, 2 * page) for page in range(num_waiting, 2 * num_waiting))
    num_steps = 0

    def count(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal num_steps
        num_steps += event == "line"
        return count

    sys.settrace(count)
    try:
        queue.hasten([3 * num_waiting // 2 * 2 * PAGE])
        queue.cancel_reads([num_waiting // 2 * 2 * PAGE, (2 * num_waiting - 1) * 2 * PAGE])
        queue.push([move(READ, 1)])
        queue.take_reads()
    finally:
        sys.settrace(None)
    return num_steps


def test_a_slot_is_whole_pages():
    assert [move_nbytes(move(READ, 0, nbytes)) for nbytes in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_a_gate_closes_after_failures_in_a_row_and_lets_one_through_after_each_pause():
    gate = Gate(max_failures=2, pauses_s=(1.0, 3.0))
    first = gate.enter(0.0)
    assert first is not None
    assert not gate.failed(first, MoveProblem.EIO, 0.0)
    assert gate.failed(first, MoveProblem.EIO, 0.0)

    closed_from_s = 0.0
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        assert gate.enter(closed_from_s + pause_s - 0.01) is None
        probe = gate.enter(closed_from_s + pause_s)
        assert probe is not None
        assert gate.enter(closed_from_s + pause_s) is None, "one at a time"
        closed_from_s += pause_s
        assert not gate.failed(probe, MoveProblem.EIO, closed_from_s), "it was closed already"

    probe = gate.enter(closed_from_s + 3.0)
    assert probe is not None
    assert gate.succeeded(probe)
    assert gate.problem is None
    again = gate.enter(closed_from_s + 3.0)
    assert again is not None
    assert gate.failed(again, MoveProblem.NO_SPACE, 100.0), "the whole drive: at once"
    assert gate.enter(100.99) is None
    assert gate.enter(101.0) is not None, "pauses begin anew"


def test_tries_that_began_before_the_gate_turned_say_nothing_any_more():
    gate = Gate(max_failures=1, pauses_s=(1.0, 60.0))
    together = [gate.enter(0.0) for _ in range(4)]
    assert together[0] is not None
    assert gate.failed(together[0], MoveProblem.NO_SPACE, 0.0)

    for ticket in together[1:3]:
        assert ticket is not None
        assert not gate.failed(ticket, MoveProblem.NO_SPACE, 0.5)
    assert together[3] is not None
    assert not gate.succeeded(together[3])

    assert gate.problem is MoveProblem.NO_SPACE
    assert gate.enter(1.0) is not None, "the pause is still the first"


def test_a_success_in_between_forgives():
    gate = Gate(max_failures=2)
    for _ in range(5):
        ticket = gate.enter(0.0)
        assert ticket is not None
        assert not gate.failed(ticket, MoveProblem.SHORT, 0.0)
        assert not gate.succeeded(ticket)
    assert gate.problem is None
