"""What the store holds, told to routers in vLLM's KV-event format.

A message's payload is MessagePack: [seconds since 1970, [event, ...], data-parallel rank], each event a map with its "type":

    BlockStored       blocks are found in a tier, in prefix order behind `parent_block_hash`
    BlockRemoved      blocks are no longer found in it
    AllBlocksCleared  forget everything: at the start, and when events were lost. What is held is told anew behind it

as vLLM 0.32 writes and reads them (vllm/distributed/kv_events.py). As `medium` ours say "CPU" for pinned RAM, "STORAGE" for
drives, and "GPU" for what engines of this node have reported of their own pools; as `ownership` "kvstore:<namespace in hex>",
since equal hashes of two namespaces are different blocks. Hashes are the low 64 bits as an integer, vLLM's default: blocks of
a vLLM engine have the numbers that the engine's own events give them. Token ids are not known here; `token_ids` is empty, as
in vLLM's own events of its lower tiers.

    store ──on_event──> pending, for one turn of the loop ──> Publisher's queue ──> thread

The loop never waits. When the queue is full (MAX_QUEUED_EVENT_BLOCKS), what is in it is dropped, events are dropped until it
is empty, and then AllBlocksCleared goes out and all that is held is told anew, in slices.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.events import BlockRemoved, BlockStored, Event
from kvstore.core.limits import (
    EVENT_DRAIN_DEADLINE_S,
    EVENT_RETELL_S,
    EVENT_SLICE_ROWS,
    MAX_NAMESPACES,
    MAX_QUEUED_EVENT_BLOCKS,
)
from kvstore.presence import HBM
from kvstore.store import Store

if TYPE_CHECKING:
    from kvstore.config import Config
    from kvstore.kv_publisher import Publisher

logger = logging.getLogger(__name__)

MEDIUMS = {"pinned": "CPU", "nvme": "STORAGE", HBM: "GPU"}
"""By tier; vLLM's names."""

_LOW_64_BITS = (1 << 64) - 1
_RANK = 0
_DRAIN_POLL_S = 0.01
_encode = msgspec.msgpack.Encoder().encode


class _Event(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """vLLM's KVCacheEvent."""


class WireStored(_Event, tag="BlockStored"):
    """Fields in vLLM's order; those with a default are left out when they have it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    ownership: str | None = None


class WireRemoved(_Event, tag="BlockRemoved"):
    """As above."""

    block_hashes: list[int]
    medium: str | None
    ownership: str | None = None


class WireCleared(_Event, tag="AllBlocksCleared"):
    """Nothing is held any more."""


class _WireBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[_Event]
    data_parallel_rank: int | None = None


def encode_batch(events: Sequence[Event | None], block_tokens: Sequence[int], now_s: float) -> bytes:
    """A payload. None is AllBlocksCleared; `block_tokens` are those of each event's namespace."""
    wire = [_wire(event, tokens) for event, tokens in zip(events, block_tokens, strict=True)]
    return _encode(_WireBatch(now_s, wire, _RANK))


def _wire(event: Event | None, block_tokens: int) -> _Event:
    if event is None:
        return WireCleared()
    hashes = [_number(key) for key in event.hashes]
    medium, owner = MEDIUMS[event.tier], f"kvstore:{event.namespace.hex()}"
    if isinstance(event, BlockRemoved):
        return WireRemoved(hashes, medium, owner)
    parent = _number(event.parent) if event.parent else None
    return WireStored(hashes, parent, [], block_tokens, None, medium, None, owner)


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big") & _LOW_64_BITS


class KVEvents:
    """The loop's side. `open` may run on another thread; all else on the loop's."""

    def __init__(
        self, config: "Config", loop: asyncio.AbstractEventLoop, *, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._loop = loop
        self._wall_s = wall_s
        self._publisher: Publisher | None = None
        self._store: Store | None = None
        self._block_tokens: dict[bytes, int] = {}  # by namespace
        self._pending: list[Event] = []
        self._lost = True  # nothing has been told yet
        self._telling: asyncio.Task[None] | None = None
        self._told_anew_s = -EVENT_RETELL_S

    def open(self) -> None:
        """Bind. Raises ConfigError."""
        config = self._config
        try:
            from kvstore.kv_publisher import Publisher
        except ImportError as err:
            raise ConfigError(
                "events: they need the extra `events` (pip install 'kvstore-tiered[events]')",
                field="events",
                value=config.events,
            ) from err
        publisher = Publisher(
            config.events, config.events_replay, topic=config.events_topic, on_forgotten=self._forgotten
        )
        publisher.open()
        self._publisher = publisher

    def join(self, store: Store) -> None:
        """Begin: whatever subscribers believed of this node is void."""
        self._store = store
        self.announce_all()

    def on_event(self, event: Event) -> None:
        """Of the store."""
        if self._lost:
            return  # told with all the rest
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(event)

    def announce_all(self) -> None:
        """Tell everything anew, behind AllBlocksCleared."""
        self._pending.clear()
        self._lost = True
        if self._telling is None or self._telling.done():
            self._telling = self._loop.create_task(self._tell())

    async def close(self, deadline_s: float) -> None:
        """Send what is left, and end."""
        self._flush()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.stop, deadline_s)
        self._lost = True

    def _flush(self) -> None:
        events, self._pending = self._pending, []
        if events and not self._put(events):
            logger.warning(
                "events lost, more than %d blocks in them are not sent; all is told anew", MAX_QUEUED_EVENT_BLOCKS
            )
            self.announce_all()

    def _put(self, events: Sequence[Event | None]) -> bool:
        from kvstore.kv_publisher import Batch

        assert self._publisher is not None
        tokens = [self._tokens(event) for event in events]
        num_blocks = sum(len(event.hashes) for event in events if event is not None)
        return self._publisher.put(Batch(num_blocks, partial(encode_batch, events, tokens, self._wall_s())))

    def _tokens(self, event: Event | None) -> int:
        """Of the event's blocks; a removal does not tell it, and its namespace may be closed by now."""
        if not isinstance(event, BlockStored):
            return 0
        assert self._store is not None
        if event.namespace not in self._block_tokens:
            if len(self._block_tokens) >= MAX_NAMESPACES:
                self._block_tokens.clear()
            self._block_tokens[event.namespace] = self._store.spec(event.namespace).block_tokens
        return self._block_tokens[event.namespace]

    # --- telling anew -------------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        """Until nothing is lost. Blocks that come or go meanwhile are told as they do: a row is looked at when its slice is."""
        assert self._publisher is not None
        while self._lost and self._publisher.alive:
            try:
                await self._drained()
                self._lost, self._told_anew_s = False, self._loop.time()
                self._put([None])
                await self._tell_slices()
            except TimeoutError:
                logger.warning("events are behind by more than %g s; all is told anew", EVENT_DRAIN_DEADLINE_S)
                self._lost = True

    async def _tell_slices(self) -> None:
        assert self._store is not None
        first = 0
        while first < self._store.num_rows and not self._lost:
            self._flush()  # what happened before this slice was looked at goes before it
            if (events := self._store.held_events(first, EVENT_SLICE_ROWS)) and not self._put(events):
                self._lost = True
            first += EVENT_SLICE_ROWS
            await self._drained()
        for namespace, keys in self._store.presence.snapshot():
            for part in (keys[i : i + EVENT_SLICE_ROWS] for i in range(0, len(keys), EVENT_SLICE_ROWS)):
                if self._lost:
                    return
                self._flush()
                if (events := self._store.presence.held_events(namespace, part)) and not self._put(events):
                    self._lost = True
                await self._drained()

    async def _drained(self) -> None:
        """Raises TimeoutError."""
        assert self._publisher is not None
        async with asyncio.timeout(EVENT_DRAIN_DEADLINE_S):
            while not self._publisher.idle:
                await asyncio.sleep(_DRAIN_POLL_S)

    def _forgotten(self) -> None:
        """Somebody asked for what is not in the replay buffer any more. The publisher's thread."""
        with contextlib.suppress(RuntimeError):  # what asyncio raises for a closed loop: we are stopping
            self._loop.call_soon_threadsafe(self._retell)

    def _retell(self) -> None:
        if self._loop.time() - self._told_anew_s >= EVENT_RETELL_S:
            self.announce_all()
