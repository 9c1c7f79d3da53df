"""A SmallStore with drives below it whose orders the test carries out by hand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from small_store import PAGE, SEGMENT, SmallStore

from kvstore.core.moves import DRIVE_SHIFT, Forget, Move, MoveDone, MoveProblem, Urgency
from kvstore.core.plans import ReadGrant
from kvstore.spill import SpillPolicy
from kvstore.store_stats import TierStats
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots
from kvstore.tiers.striped import StripedSlots


class OnDrives(NamedTuple):
    """RestoredBlocks."""

    keys: list[bytes]
    parents: list[bytes]
    offsets: NDArray[np.int64]
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    last_use: NDArray[np.int64]
    hits: NDArray[np.uint32]


class SmallSpill(SmallStore):
    """`drives`: segments of each. `restored`: a sequence that they have from before, dealt out in turn; it lies in no RAM."""

    def __init__(
        self,
        *,
        num_segments: int = 4,
        drives: Sequence[int] = (4, 4),
        restored: Sequence[str] = (),
        start: bool = True,
        write_policy: str = "write_through",
        bytes_per_s: int = 0,
        bytes_per_day: int = 0,
        **limits: Any,
    ) -> None:
        counted = CountedGenerations()
        self.num_drive_segments = drives
        self.each = [SegmentedSlots(count * SEGMENT, generations=counted, segment_bytes=SEGMENT) for count in drives]
        self.drives = StripedSlots(self.each)
        policy = SpillPolicy(write_policy, bytes_per_s, bytes_per_day)  # type: ignore[arg-type]
        super().__init__(num_segments=num_segments, nvme=self.drives, spill=policy, **limits)
        self.namespaces: list[bytes] = []  # told to the drives
        self.forgets: list[Forget] = []  # ordered, not reported
        self._num_restored = 0
        if restored:
            self.restore(restored)
        if start:
            self.start()

    def restore(
        self,
        names: Sequence[str],
        *,
        parent: str = "",
        parents: Sequence[str] = (),
        last_use: Sequence[int] | None = None,
        hits: Sequence[int] | None = None,
    ) -> None:
        """One sequence; several calls are slices of what is on the drives. `parent` is the name before, known or not; or
        `parents` has that of each name, "" for none."""
        keys, count, first = self.keys(names), len(names), self._num_restored
        self._num_restored += count
        before = parents or [parent, *names[:-1]]
        numbers = np.arange(first, first + count)
        blocks = OnDrives(
            keys,
            [self.keys([name])[0] if name else b"" for name in before],
            (numbers % len(self.each) << DRIVE_SHIFT) + numbers // len(self.each) * PAGE,
            (numbers + 1).astype(np.uint64),
            (numbers + 1000).astype(np.uint64),
            np.array(range(count, 0, -1) if last_use is None else last_use, np.int64),
            np.array([0] * count if hits is None else hits, np.uint32),
        )
        self.store.restore(self.spec, "", blocks)

    def start(self, written: Mapping[int, int] | None = None, wall_offset_s: float = 0.0) -> None:
        for drive, count in zip(self.each, self.num_drive_segments, strict=True):
            drive.add_segments(count)
        self.store.start_spilling(written or {}, wall_offset_s)
        self.store.check()

    def orders(self, now_s: float = 0.0) -> list[Move]:
        """The moves that are to begin now; what else was ordered is kept."""
        orders = self.store.take_orders(now_s)
        self.store.check()
        self.namespaces += [namespace for namespace, _, _ in orders.namespaces]
        self.forgets += orders.forgets
        return list(orders.moves)

    def finish(self, moves: Iterable[Move], problem: MoveProblem | None = None, now_s: float = 0.0) -> None:
        """They end, all alike."""
        done = [MoveDone(move.move_id, self.checksum(move), problem) for move in moves]
        self.store.finish_moves(done, now_s)
        self.store.check()

    def settle(self, now_s: float = 0.0) -> list[Move]:
        """Everything that is ordered ends well, removals are durable; the moves in their order."""
        moves: list[Move] = []
        while (begun := self.orders(now_s)) or self.forgets:
            self.finish(begun, now_s=now_s)
            self.commit_index()
            moves += begun
        return moves

    def commit_index(self) -> None:
        """The removals ordered so far are durable."""
        self.store.finish_forgets(self.forgets)
        self.forgets = []
        self.store.check()

    def names(self, of: Iterable[Move | Forget]) -> list[str]:
        keys = [item.record.key if isinstance(item, Move) else item.key for item in of]
        return [key.rstrip(b".").decode() for key in keys]

    def tiers_of(self, names: Sequence[str]) -> list[int]:
        """Of each block of the prefix that can be read."""
        return list(self.store.match(self.namespace, self.keys(names), 0.0).tiers)

    def announced(self, grant: ReadGrant) -> list[bool]:
        """Which of its slots show the generation that was granted."""
        return [int(self.generations[extent.offset // PAGE]) == extent.generation for extent in grant.extents]

    def nvme(self) -> TierStats:
        self.store.check()
        tier = self.store.stats().tiers[1]
        used = tier.ready_bytes + tier.writing_bytes + tier.leaving_bytes + tier.limbo_bytes + tier.quarantined_bytes
        assert used + tier.free_bytes == tier.capacity_bytes
        return tier

    @staticmethod
    def checksum(move: Move) -> int:
        """What a drive says of a block that it wrote."""
        return move.move_id + 5000 if move.urgency is Urgency.WRITE else 0


def drive_of(move: Move) -> int:
    return move.record.offset >> DRIVE_SHIFT
