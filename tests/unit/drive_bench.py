"""What the tests of a drive share: a file whose calls can be held, and a drive over it that notes all it reports."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from faulty_file import PAGE, FaultyFile
from xxhash import xxh3_64_intdigest

from kvstore.core.moves import BlockRecord, Move, MoveDone, MoveProblem, Urgency
from kvstore.tiers.nvme.drive import Drive
from kvstore.tiers.nvme.file import BlockFile, page_aligned

READ, PREFETCH, WRITE = Urgency
DEADLINE_S = 20.0
FILE_BYTES = 256 * PAGE


class HeldFile(FaultyFile):
    """Calls for pages that are held wait until they are let go."""

    def __init__(self, inner: BlockFile | None = None) -> None:
        super().__init__(inner)
        self.held: set[int] = set()
        self.inside: list[int] = []
        self.most_writing = self.most_at_once = 0
        self._running: list[str] = []
        self._changed = threading.Condition()

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._counted("read", offset):
            return super().read_into(offset, views)

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._counted("write", offset):
            return super().write_from(offset, views)

    def wait_until_inside(self, *pages: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(pages) <= set(self.inside), DEADLINE_S)

    def let_go(self, *pages: int) -> None:
        """These, or all."""
        with self._changed:
            self.held -= set(pages or self.held)
            self._changed.notify_all()

    @contextlib.contextmanager
    def _counted(self, verb: str, offset: int) -> Iterator[None]:
        page = offset // PAGE
        with self._changed:
            self._running.append(verb)
            self.most_writing = max(self.most_writing, self._running.count("write"))
            self.most_at_once = max(self.most_at_once, len(self._running))
            self.inside.append(page)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: page not in self.held, DEADLINE_S)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(verb)


class Bench:
    """A drive over a file, its arena of 256 pages, and what it reported."""

    def __init__(self, file: BlockFile, *, threads: int = 1, max_io_bytes: int = 4 * PAGE, first_slot: int = 0) -> None:
        self.file = file
        self.now_s = 0.0
        self.arena = page_aligned(256 * PAGE)
        self.done: dict[int, MoveDone] = {}
        self.order: list[int] = []
        self.written: dict[int, BlockRecord] = {}
        self.drive = Drive(
            file,
            name="0",
            arena=self.arena,
            on_done=self._on_done,
            on_written=self._on_written,
            first_slot=first_slot,
            threads=threads,
            max_io_bytes=max_io_bytes,
            monotonic=lambda: self.now_s,
        )
        self._changed = threading.Condition()
        self._num_moves = 0
        self._started = False

    def move(self, urgency: Urgency, page: int, *, arena_page: int, nbytes: int = PAGE, checksum: int = 0) -> Move:
        self._num_moves += 1
        record = BlockRecord(b"n" * 16, b"k" * 16, b"", page * PAGE, nbytes, 1, checksum, 0, 0)
        return Move(self._num_moves, urgency, arena_page * PAGE, record)

    def run(self, moves: Sequence[Move]) -> list[MoveProblem | None]:
        """Submit, start if need be, wait for all of them."""
        self.drive.submit(moves)
        self.start()
        return self.wait(moves)

    def start(self) -> None:
        if not self._started:
            self._started = True
            self.drive.start()

    def wait(self, moves: Sequence[Move]) -> list[MoveProblem | None]:
        ids = [move.move_id for move in moves]
        with self._changed:
            assert self._changed.wait_for(lambda: self.done.keys() >= set(ids), DEADLINE_S)
            return [self.done[each].problem for each in ids]

    def wait_until_idle(self, num_threads: int) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while self.drive._num_idle < num_threads:
            assert time.monotonic() < ends_s
            time.sleep(0.001)

    def wait_until_free(self) -> None:
        """The end of the last move was reported, and its thread has let go of it."""
        ends_s = time.monotonic() + DEADLINE_S
        while self.drive.busy():
            assert time.monotonic() < ends_s
            time.sleep(0.001)

    def write(self, pages: Sequence[int]) -> list[MoveProblem | None]:
        """A page each, all bytes alike: its number, out of the arena's page of that number."""
        for page in pages:
            self.arena[page * PAGE : (page + 1) * PAGE] = page
        return self.run([self.move(WRITE, page, arena_page=page) for page in pages])

    def read(self, pages: Sequence[int]) -> list[MoveProblem | None]:
        """A page each; what arrives without a problem is what `write` wrote."""
        moves = [
            self.move(READ, page, arena_page=128 + j, checksum=xxh3_64_intdigest(bytes([page]) * PAGE))
            for j, page in enumerate(pages)
        ]
        self.arena[128 * PAGE :] = 0xEE
        problems = self.run(moves)
        for move, page, problem in zip(moves, pages, problems, strict=True):
            if problem is None:
                assert (self.arena[move.arena_offset : move.arena_offset + PAGE] == page).all()
        return problems

    def _on_done(self, ends: list[MoveDone]) -> None:
        with self._changed:
            for end in ends:
                assert end.move_id not in self.done, "a move ends once"
                self.done[end.move_id] = end
                self.order.append(end.move_id)
            self._changed.notify_all()

    def _on_written(self, records: list[BlockRecord]) -> None:
        assert records
        with self._changed:
            for record in records:
                self.written[record.offset] = record


@contextlib.contextmanager
def benches() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def _make(file: BlockFile | None = None, **settings: int) -> Bench:
        file = HeldFile() if file is None else file
        file.resize(FILE_BYTES)
        made.append(Bench(file, **settings))
        return made[-1]

    yield _make
    for each in made:
        if isinstance(each.file, HeldFile):
            each.file.let_go()
        assert each.drive.close(DEADLINE_S)
        each.file.close()


def ranges(bench: Bench, verb: str) -> list[tuple[int, int]]:
    """(first page, number of pages) of each call."""
    assert isinstance(bench.file, FaultyFile)
    return [(call.offset // PAGE, call.nbytes // PAGE) for call in bench.file.calls if call.verb == verb]


@contextlib.contextmanager
def closing(bench: Bench) -> Iterator[threading.Event]:
    """The drive closes meanwhile, on another thread; set when it has."""
    answers: list[bool] = []
    closed = threading.Event()
    closer = threading.Thread(target=lambda: (answers.append(bench.drive.close(DEADLINE_S)), closed.set()))
    closer.start()
    yield closed
    closer.join(DEADLINE_S)
    assert answers == [True]
