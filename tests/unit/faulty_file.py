"""A data file that can be damaged on purpose: a BlockFile in RAM, and a layer of faults around any BlockFile.

    file = FaultyFile()                              # around a new MemoryFile; or FaultyFile(DirectFile.open(path))
    file.fail("read", errno.EIO, offset=8192, nbytes=4096)     # reads that meet these bytes raise, others do not
    file.fail("write", errno.ENOSPC, after=3, times=1)         # three writes go well, the fourth raises, then it is over
    file.fail("sync", errno.EIO)                               # every sync, until heal()
    file.shorten("read", 4096, offset=65536)                   # reads that reach byte 65536 deliver 4,096 bytes
    file.flip(4096 + 17, bit=3)                                # one bit, unnoticed
    file.unlink()                                              # is_linked() is False from now on
    file.heal()                                                # forget what was ordered by fail and shorten
    after = file.crash(survive=0.5, rng=random.Random(1))      # power cut; `file` is dead, `after` is what is found
    after = file.kill()                                        # kill -9; likewise, but everything written is there
    file.calls                                                 # every call that came in, in order

A crash takes back every 4 KiB page written since the last sync (its older bytes return), except those that survive by
chance: with 0 < survive < 1 a block of several pages is torn. Changes of size survive. A page lost is never half a page: that
is what drives promise. What a killed process has written but not synced can still be lost by a crash afterwards.

A dead file raises OSError(EIO) from every verb, so that threads left over from before do no harm.
"""

import errno
import itertools
import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.tiers.nvme.file import BlockFile, page_aligned

PAGE = SLOT_ALIGN_BYTES
Verb = Literal["read", "write", "sync", "resize"]


class Call(NamedTuple):
    """A call that came in; sync has no range."""

    verb: Verb
    offset: int = 0
    nbytes: int = 0


class MemoryFile:
    """A BlockFile in RAM. Reads at and beyond the end are short; writes there let it grow."""

    def __init__(self, nbytes: int = 0) -> None:
        self._bytes = bytearray(nbytes)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._lock:
            done = 0
            for view in views:
                found = self._bytes[offset + done : offset + done + view.nbytes]
                view[: len(found)] = found
                done += len(found)
        return done

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._lock:
            done = 0
            for view in views:
                self._grow(offset + done)
                self._bytes[offset + done : offset + done + view.nbytes] = view
                done += view.nbytes
        return done

    def sync(self) -> None:
        """RAM is as durable as it gets; FaultyFile.crash knows what was not synced."""

    def resize(self, nbytes: int) -> None:
        with self._lock:
            del self._bytes[nbytes:]
            self._grow(nbytes)

    def is_linked(self) -> bool:
        return True

    def close(self) -> None:
        """The bytes stay: whoever holds the object can open the "file" again by using it."""

    def _grow(self, nbytes: int) -> None:
        self._bytes.extend(bytes(max(0, nbytes - len(self._bytes))))


@dataclass
class _Fault:
    """An order to fail or shorten calls of `verb` that meet [offset, end)."""

    verb: Verb
    offset: int
    end: float
    after: int
    times: float
    errno_: int = 0  # 0: shorten
    nbytes: int = 0

    def strikes(self, call: Call) -> bool:
        """Does this call meet it? Counts it if so."""
        if call.verb != self.verb or not (call.offset < self.end and self.offset < call.offset + max(call.nbytes, 1)):
            return False
        self.after -= 1
        if self.after >= 0 or self.times <= 0:
            return False
        self.times -= 1
        return True


class FaultyFile:
    """See the module."""

    def __init__(self, inner: BlockFile | None = None) -> None:
        self.calls: list[Call] = []
        self._inner: BlockFile = MemoryFile() if inner is None else inner
        self._older: dict[int, bytes] = {}  # page number -> its bytes at the last sync, if written since
        self._faults: list[_Fault] = []
        self._linked = True
        self._dead = False
        self._lock = threading.RLock()

    # --- the file -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._lock:
            limit = self._meet(Call("read", offset, _total(views)))
            return self._inner.read_into(offset, _first(views, limit))

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._lock:
            limit = self._meet(Call("write", offset, _total(views)))
            head = _first(views, limit)
            self._remember(offset, _total(head))
            return self._inner.write_from(offset, head)

    def sync(self) -> None:
        with self._lock:
            self._meet(Call("sync"))
            self._inner.sync()
            self._older.clear()

    def resize(self, nbytes: int) -> None:
        with self._lock:
            self._meet(Call("resize", 0, nbytes))
            self._inner.resize(nbytes)
            self._older = {page: older for page, older in self._older.items() if (page + 1) * PAGE <= nbytes}

    def is_linked(self) -> bool:
        return self._linked and self._inner.is_linked()

    def close(self) -> None:
        """The inner file stays open: it belongs to the test, and `kill` or `crash` gives it a next life."""

    # --- the damage ---------------------------------------------------------------------------------------------------

    def fail(
        self,
        verb: Verb,
        errno_: int,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Raise OSError(errno_) from calls that meet the range (default: all), after that many that do not, so many times."""
        self._order(_Fault(verb, offset, _end(offset, nbytes), after, _forever(times), errno_))

    def shorten(
        self,
        verb: Literal["read", "write"],
        to_nbytes: int,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Move at most `to_nbytes` in calls that meet the range, and say so."""
        self._order(_Fault(verb, offset, _end(offset, nbytes), after, _forever(times), 0, to_nbytes))

    def heal(self) -> None:
        """No more failures nor short calls. What was flipped stays flipped."""
        with self._lock:
            self._faults.clear()

    def flip(self, offset: int, bit: int = 0) -> None:
        """Flip one bit behind everybody's back."""
        with self._lock:
            page = offset // PAGE
            damaged = bytearray(self._page(page))
            damaged[offset % PAGE] ^= 1 << bit
            self._put_page(page, damaged)

    def unlink(self) -> None:
        """Somebody deletes the file under us."""
        self._linked = False

    def kill(self) -> Self:
        """The process dies, the machine does not."""
        with self._lock:
            after = type(self)(self._inner)
            after._older = dict(self._older)
            self._dead = True
            return after

    def crash(self, *, survive: float = 0.0, rng: random.Random | None = None) -> Self:
        """The power goes."""
        assert survive == 0 or rng is not None, "chance needs a seed"
        with self._lock:
            for page, older in sorted(self._older.items()):
                if rng is None or rng.random() >= survive:
                    self._put_page(page, older)
            self._dead = True
            return type(self)(self._inner)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _order(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _meet(self, call: Call) -> int:
        """Count the call, raise what was ordered, answer how many bytes it may move."""
        self.calls.append(call)
        if self._dead:
            raise OSError(errno.EIO, "the machine this file was open on is gone")
        limit = call.nbytes
        for fault in self._faults:
            if fault.strikes(call):
                if fault.errno_:
                    raise OSError(fault.errno_, os.strerror(fault.errno_))
                limit = min(limit, fault.nbytes)
        return limit

    def _remember(self, offset: int, nbytes: int) -> None:
        for page in range(offset // PAGE, -(-(offset + nbytes) // PAGE)):
            if page not in self._older:
                self._older[page] = self._page(page)

    def _page(self, page: int) -> bytes:
        buffer = page_aligned(PAGE)
        self._inner.read_into(page * PAGE, [memoryview(buffer)])
        return buffer.tobytes()

    def _put_page(self, page: int, content: bytes | bytearray) -> None:
        buffer = page_aligned(PAGE)
        buffer.data[:] = content
        assert self._inner.write_from(page * PAGE, [memoryview(buffer)]) == PAGE


def _total(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _first(views: Sequence[memoryview], limit: int) -> list[memoryview]:
    starts = itertools.accumulate((view.nbytes for view in views), initial=0)
    return list(_cut(views, starts, limit))


def _cut(views: Sequence[memoryview], starts: Iterator[int], limit: int) -> Iterator[memoryview]:
    for view, start in zip(views, starts, strict=False):
        if start < limit:
            yield view[: limit - start]


def _end(offset: int, nbytes: int | None) -> float:
    return float("inf") if nbytes is None else offset + nbytes


def _forever(times: int | None) -> float:
    return float("inf") if times is None else times
