"""The NVMe tier: carries out on its drives what the brains order, and tells what became of it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import slot_nbytes
from kvstore.core.errors import TierIOError
from kvstore.core.limits import DRIVE_THREADS
from kvstore.core.moves import BAD_SLOT, DRIVE_SHIFT, Forget, Move, MoveDone, MoveProblem, Touch, Urgency
from kvstore.tiers.nvme.directory import DriveDirectory
from kvstore.tiers.nvme.drive import Drive
from kvstore.tiers.nvme.file import BlockFile, DirectFile
from kvstore.tiers.nvme.index import DriveIndex
from kvstore.tiers.nvme.probe import DriveSpeed, ReadProbe, Used
from kvstore.tiers.nvme.records import HEADER_NBYTES
from kvstore.tiers.nvme.recovery import DriveScan, Recovered, merge
from kvstore.tiers.nvme.tables import OFFSET_MASK, Erase

logger = logging.getLogger(__name__)

_ERASE_SLICE = 32768  # entries removed in one transaction at recovery


class DriveHealth(NamedTuple):
    """How a drive is."""

    path: Path
    state: str  # recovering, ready, degraded, off
    reason: str  # empty when ready
    capacity_bytes: int
    problems: dict[str, int]  # since start: by MoveProblem, "deleted", "index" (damaged entries, failed group commits)


class _Member:
    """One drive of the tier: directory, index and I/O; `off` says why it has none."""

    def __init__(self, number: int, directory: DriveDirectory) -> None:
        self.number = number
        self.directory = directory
        self.drive: Drive | None = None
        self.index: DriveIndex | None = None
        self.off = ""
        self.damaged_entries = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.off else self.directory.nbytes


class NvmeTier:
    """`paths[i]` is drive i; each is self-contained, so that one that is lost takes only its own blocks.

        open() -> recover() -> submit, cancel, forget, touch, add_namespace ..., probe() -> close()

    `on_moved` is called on I/O threads, or at once by who submits what cannot even be tried; `on_forgotten` on index threads.
    Both must be short and must not raise; none is called after `close` returns.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        nbytes: int,
        *,
        segment_bytes: int,
        arena: NDArray[np.uint8],
        on_moved: Callable[[Sequence[MoveDone]], None],
        on_forgotten: Callable[[Sequence[Forget]], None],
        threads: int = DRIVE_THREADS,
        open_file: Callable[[Path], BlockFile] = DirectFile.open,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`nbytes` of slots on each drive; 0: as many as there are, at first half of what is free."""
        self._nbytes = nbytes
        self._segment_bytes = segment_bytes
        self._arena = arena
        self._on_moved = on_moved
        self._on_forgotten = on_forgotten
        self._threads = threads
        self._wall_s = wall_s
        self._recovered = False
        self._probe: ReadProbe | None = None
        self._members = [
            _Member(number, DriveDirectory(Path(path), segment_bytes=segment_bytes, open_file=open_file))
            for number, path in enumerate(paths)
        ]

    @property
    def drive_nbytes(self) -> tuple[int, ...]:
        """Bytes for slots on each drive, whole segments; 0 for one that is off."""
        return tuple(member.nbytes for member in self._members)

    def open(self) -> None:
        """Take the directories. Blocks. Raises ConfigError for what the operator must decide, and then holds none of them;
        a drive that cannot be used is off, and the others work."""
        try:
            for member in self._members:
                self._open_member(member)
        except BaseException:
            self.close(0.0)
            raise

    def recover(self) -> Recovered:
        """What is on the drives. Once, after `open`; from then on entries are written. Blocks."""
        assert not self._recovered
        scans = [part for member in self._members if (part := self._scan(member)) is not None]
        off = [str(member.directory.path) for member in self._members if member.off]
        recovered, erase = merge(scans, segment_bytes=self._segment_bytes, all_there=not off)
        if recovered.waiting:
            logger.warning(
                "nvme: %d blocks stay and wait for those in front of them, on drives that are off: %s; without these drives in "
                "the settings their slots are free",
                len(recovered.waiting),
                ", ".join(off),
            )
        for _, scan, _ in scans:
            for namespace, named in scan.namespaces.items():
                self.add_namespace(namespace, named.tenant, named.canonical)
        for drive, scan, _ in scans:
            self._members[drive].damaged_entries = len(scan.damaged)
            self._start(self._members[drive], erase[drive])
        self._probe = self._make_probe(recovered)
        self._recovered = True
        return recovered

    def probe(self) -> DriveSpeed | None:
        """How fast the drives read what `recover` found, all together. Once, after it, on a thread of its own: blocks until
        PROBE_DEADLINE_S at most. None: there is too little on them, or they do not answer."""
        assert self._probe is not None, "the tier has not recovered"
        return self._probe.run()

    def add_namespace(self, namespace: bytes, tenant: str, canonical: bytes) -> None:
        """Before the first write of one of its blocks. Each drive that gets one keeps a copy of this."""
        for member in self._members:
            if member.index is not None:
                member.index.namespace(namespace, tenant, canonical)

    def submit(self, moves: Iterable[Move]) -> None:
        """Begin moves. Any thread; never blocks."""
        by_drive: dict[int, list[Move]] = {}
        for move in moves:
            by_drive.setdefault(move.record.offset >> DRIVE_SHIFT, []).append(move)
        for number, group in by_drive.items():
            self._submit(self._members[number], group)

    def cancel(self, offsets: Iterable[int]) -> None:
        """Nobody waits for the blocks in these slots any more: reads and prefetches of them that were not begun end with
        CANCELLED before this returns, those begun go on. Any thread; never blocks."""
        for number, slots in _by_drive(offsets).items():
            if (drive := self._members[number].drive) is not None:
                drive.cancel(slots)

    def hasten(self, offsets: Iterable[int]) -> None:
        """Somebody waits for the blocks in these slots now: prefetches of them that were not begun become reads, behind those
        that wait already. Any thread; never blocks."""
        for number, slots in _by_drive(offsets).items():
            if (drive := self._members[number].drive) is not None:
                drive.hasten(slots)

    def forget(self, forgets: Iterable[Forget]) -> None:
        """Remove entries. Any thread; never blocks. A drive that is off has none."""
        by_drive: dict[int, list[Forget]] = {}
        for forget in forgets:
            by_drive.setdefault(forget.offset >> DRIVE_SHIFT, []).append(forget)
        for number, group in by_drive.items():
            if (index := self._members[number].index) is not None:
                index.forget(group)
            else:
                self._on_forgotten(group)

    def touch(self, touches: Iterable[Touch]) -> None:
        """Write down recency. Any thread; never blocks."""
        by_drive: dict[int, list[Touch]] = {}
        for touch in touches:
            by_drive.setdefault(touch.offset >> DRIVE_SHIFT, []).append(touch)
        for number, group in by_drive.items():
            if (index := self._members[number].index) is not None:
                index.touch(group)

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything that ended so far is durable. False: not by the deadline."""
        end_s = time.monotonic() + deadline_s
        indexes = [member.index for member in self._members if member.index is not None]
        return all(index.flush(max(end_s - time.monotonic(), 0.0)) for index in indexes)

    def drives(self) -> tuple[DriveHealth, ...]:
        """Any thread; never blocks."""
        return tuple(self._health(member) for member in self._members)

    def close(self, deadline_s: float) -> bool:
        """End: moves not begun are STOPPED, those in flight are waited for, what is written becomes durable. Idempotent.

        False: not by the deadline. A drive whose I/O hangs keeps its files open until the process ends.
        """
        end_s = time.monotonic() + deadline_s
        half_s = end_s - deadline_s / 2
        drives = [member.drive for member in self._members if member.drive is not None]
        idle = [drive.close(_share(half_s, len(drives) - i)) for i, drive in enumerate(drives)]
        indexes = [member.index for member in self._members if member.index is not None]
        durable = [index.close(_share(end_s, len(indexes) - i)) for i, index in enumerate(indexes)]
        if self._probe is not None:
            idle.append(self._probe.close(max(end_s - time.monotonic(), 0.0)))
        if all(idle) and not any(index.is_alive() for index in indexes):
            for member in self._members:
                member.directory.close()
        return all(idle) and all(durable)

    def _open_member(self, member: _Member) -> None:
        try:
            member.directory.open(self._nbytes)
        except (OSError, TierIOError) as err:
            self._turn_off(member, str(err))
            return
        name = str(member.number)
        member.index = DriveIndex(
            member.directory.tables,
            name=name,
            sync_data=member.directory.file.sync,
            on_forgotten=self._on_forgotten,
            wall_s=self._wall_s,
        )
        member.drive = Drive(
            member.directory.file,
            name=name,
            arena=self._arena,
            on_done=self._on_moved,
            on_written=member.index.put,
            first_slot=HEADER_NBYTES,
            threads=self._threads,
        )

    def _turn_off(self, member: _Member, reason: str) -> None:
        logger.error("nvme %s: off: %s", member.directory.path, reason)
        member.off = reason
        member.drive = member.index = None
        member.directory.close()

    def _scan(self, member: _Member) -> DriveScan | None:
        if member.index is None:
            return None
        try:
            scan = member.directory.tables.scan()
        except TierIOError as err:
            self._turn_off(member, err.message)
            return None
        return DriveScan(member.number, scan, member.directory.valid_nbytes)

    def _start(self, member: _Member, erase: list[Erase]) -> None:
        """Remove what recovery left over, durably, before any of its slots is used again. When the drive does not let us,
        it waits in front of the queue: an entry put later comes after it, and until then nothing is written."""
        assert member.index is not None
        assert member.drive is not None
        try:
            for first in range(0, len(erase), _ERASE_SLICE):
                member.directory.tables.commit(erase[first : first + _ERASE_SLICE], {}, 0)
            member.directory.settle()
        except TierIOError as err:
            # One line: what failed is in it, and where it came from tells the operator nothing.
            logger.error("nvme %s: left-over entries wait to be removed: %s", member.directory.path, err.message)  # noqa: TRY400
            member.index.redo(erase)
        if num_removed := sum(each.table != "namespaces" for each in erase):  # a namespace without blocks is no loss
            logger.warning("nvme %s: %d entries removed at recovery", member.directory.path, num_removed)
        member.index.start()
        member.drive.start()

    def _make_probe(self, recovered: Recovered) -> ReadProbe:
        files: dict[BlockFile, list[Used]] = {}
        for member in self._members:
            if member.drive is not None:
                files[member.directory.file] = [
                    Used((blocks.offsets[there] & OFFSET_MASK) + HEADER_NBYTES, slot_nbytes(blocks.nbytes))
                    for blocks in recovered.namespaces
                    if (there := blocks.offsets >> DRIVE_SHIFT == member.number).any()
                ]
        return ReadProbe(files)

    def _submit(self, member: _Member, moves: list[Move]) -> None:
        if member.drive is None or member.index is None:
            self._on_moved([MoveDone(move.move_id, problem=MoveProblem.GONE) for move in moves])
            return
        if (trouble := member.index.problem) is not None:
            problem = MoveProblem.GONE if trouble[0] in BAD_SLOT else trouble[0]  # no slot was tried, so none is blamed
            refused = [move for move in moves if move.urgency is Urgency.WRITE]
            moves = [move for move in moves if move.urgency is not Urgency.WRITE]
            self._on_moved([MoveDone(move.move_id, problem=problem) for move in refused])
        member.drive.submit(moves)

    def _health(self, member: _Member) -> DriveHealth:
        path, capacity_bytes = member.directory.path, member.nbytes
        if member.drive is None or member.index is None:
            return DriveHealth(path, "off", member.off or "not open", 0, {})
        health = member.drive.health()
        problems = Counter(health.problems)
        if failures := member.damaged_entries + member.index.num_failures:
            problems["index"] = failures
        trouble = member.index.problem
        reasons = [reason for reason in (health.reason, f"index: {trouble[1]}" if trouble else "") if reason]
        state = "recovering" if not self._recovered else "degraded" if reasons else "ready"
        return DriveHealth(path, state, "; ".join(reasons), capacity_bytes, dict(problems))


def _by_drive(offsets: Iterable[int]) -> dict[int, list[int]]:
    """Slots of each drive, in their order."""
    by_drive: dict[int, list[int]] = {}
    for offset in offsets:
        by_drive.setdefault(offset >> DRIVE_SHIFT, []).append(offset)
    return by_drive


def _share(end_s: float, num_left: int) -> float:
    """An equal part of the time left, so that one drive that hangs does not use up that of the others."""
    return max(end_s - time.monotonic(), 0.0) / num_left
