"""A load on the worker's load thread, from its job until it is reported: how far it is, and the copying of its next blocks."""

from dataclasses import dataclass, field

from kvstore.client import ClientArena
from kvstore.client_slab import HOST, ClientSlab
from kvstore.engine_connector.block_copies import copy_in, is_current, num_current, slot_of, takes_many
from kvstore.engine_connector.fill_cursors import FillCursors
from kvstore.engine_connector.layers import LayerProgress
from kvstore.engine_connector.protocol import BlockMove, DeviceBlockPages, LoadJob, Pages, SlabMove

_LOAD_BATCH = 32
"""Blocks of one call, of pages that take many. Between calls a load looks at its deadline: 64 MiB take a GPU some 2 ms."""


@dataclass(slots=True)
class OpenLoad:
    """A load that has not been reported. Holds the arena, so that it stays mapped until then."""

    job: LoadJob
    started_s: float
    arena: ClientArena | None = None  # None: not looked for yet, or its session is still connecting
    num_loaded: int = 0
    copying_s: float = 0.0
    progress: LayerProgress = field(default_factory=LayerProgress)
    cursors: FillCursors | None = None  # of a load from the back, which alone has it
    slab: ClientSlab | None = None  # None: it has none, or the worker
    slab_reads: dict[int, SlabMove] = field(default_factory=dict)  # by position, of blocks that lie in the slab

    @property
    def next_batch(self) -> tuple[BlockMove, ...]:
        """The next blocks of one call, of pages that take many: up to one that lies in the slab."""
        first, moves = self.num_loaded, self.job.moves
        most = range(first, min(first + _LOAD_BATCH, len(moves)))
        return moves[first : next((position for position in most if position in self.slab_reads), most.stop)]

    @property
    def until_s(self) -> float:
        """Its deadline."""
        return self.started_s + self.job.deadline_s

    @property
    def num_copied(self) -> int:
        """Blocks that are in their pages."""
        return self.num_loaded if self.cursors is None else self.cursors.num_copied

    def copy_next(self, pages: Pages) -> bool:
        """Copy the next block, which is there, and with it others that are there, where that is one call. Whether all are
        good."""
        assert self.arena is not None, "the block was looked at"
        if not (takes_many(pages) and (rest := self.next_batch)):
            good = self.copy_block(self.num_loaded, pages)
            self.num_loaded += good
            return good
        batch = rest[: num_current(self.arena, rest)]
        copy_in(
            pages,
            batch,
            [slot_of(self.arena, move.offset, pages.page_nbytes) for move in batch],
            range(pages.num_layers),
        )
        num_good = num_current(self.arena, batch)
        self.num_loaded += num_good
        return bool(batch) and num_good == len(batch)

    def copy_block(self, index: int, pages: Pages) -> bool:
        """Whether the page has the block now: it was there before the copy, and still is. From the slab if it lies there."""
        assert self.arena is not None, "the block was looked at"
        move, near, slab = self.job.moves[index], self.slab_reads.get(index), self.slab
        if near is not None and slab is not None and slab.is_current(near.offset, near.generation):
            block = slab.slot(near.offset, pages.page_nbytes)
            if slab.device != HOST:
                assert isinstance(pages, DeviceBlockPages), "see _slab_of"
                pages.copy_in_device(move.block_id, block)
            else:
                pages.copy_in(move.block_id, block)
            if slab.is_current(near.offset, near.generation):
                return True
        pages.copy_in(move.block_id, slot_of(self.arena, move.offset, pages.page_nbytes))
        return is_current(self.arena, move)


def cursors_of(job: LoadJob) -> FillCursors:
    """Of a load from the back."""
    assert not job.lost_block_ids, "a load from the back ends with a block that is there"
    return FillCursors(
        len(job.moves), front_blocks=job.front_blocks, meet_block=job.meet_block, expected_s=job.expected_s
    )
