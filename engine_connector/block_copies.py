"""Copies between an engine's pages and slots of the arena, of many blocks or of some layers; and whether a slot is still the one
that was granted."""

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvstore.client import ClientArena
from kvstore.client_arena import Arrival, arrival_of
from kvstore.engine_connector.protocol import BatchedPages, BlockMove, LayeredPages, Pages

LAYERS_COPY_BYTES = 256 << 10
"""Layers are copied so many bytes at a time or a little more. While the engine computes, each call waits for the GIL: 92 MB
that take 21 ms whole took 121 ms by single layers of 12 KiB, 54 ms by 64 KiB, 33 ms by 256 KiB."""

_known: dict[type, bool] = {}


def takes_many(pages: Pages | None) -> TypeGuard[BatchedPages]:
    """isinstance, remembered by class: it looks for each member of a protocol, for 30 to 50 us of every block."""
    kind = type(pages)
    if kind not in _known:
        _known[kind] = isinstance(pages, BatchedPages)
    return _known[kind]


def layer_steps(pages: LayeredPages, num_blocks: int) -> Iterable[range]:
    """All layers, as many at a time as are worth a call."""
    if takes_many(pages):
        step = pages.layers_a_copy(num_blocks)
    else:
        step = -(-LAYERS_COPY_BYTES * pages.num_layers // pages.page_nbytes)
    for first in range(0, pages.num_layers, step):
        yield range(first, min(first + step, pages.num_layers))


def copy_in(pages: LayeredPages, moves: Sequence[BlockMove], slots: Sequence[NDArray[np.uint8]], layers: range) -> None:
    """These layers of all these blocks."""
    if takes_many(pages):
        pages.copy_in_blocks([move.block_id for move in moves], slots, layers)
        return
    for move, slot in zip(moves, slots, strict=True):
        pages.copy_in_layers(move.block_id, slot, layers)


def copy_out(pages: LayeredPages, arena: ClientArena, moves: Sequence[BlockMove], layers: range) -> None:
    """These layers of all these pages."""
    slots = [slot_of(arena, move.offset, pages.page_nbytes) for move in moves]
    if takes_many(pages):
        pages.copy_out_blocks([move.block_id for move in moves], slots, layers)
        return
    for move, slot in zip(moves, slots, strict=True):
        pages.copy_out_layers(move.block_id, slot, layers)


def slot_of(arena: ClientArena, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """A view of its bytes."""
    return arena.array[offset : offset + nbytes]


def arrival_in(arena: ClientArena, move: BlockMove) -> Arrival:
    """Whether the block that was granted is in its slot."""
    return arrival_of(int(arena.generations[move.offset >> 12]), move.generation)


def num_current(arena: ClientArena, moves: Sequence[BlockMove]) -> int:
    """How many of the first moves' blocks are there, all without a gap."""
    return next((i for i, move in enumerate(moves) if not is_current(arena, move)), len(moves))


def is_current(arena: ClientArena, move: BlockMove) -> bool:
    """Whether the slot is what was granted. Kept also for writes: a slot that is not ours must not be touched."""
    return arrival_in(arena, move) is Arrival.THERE
