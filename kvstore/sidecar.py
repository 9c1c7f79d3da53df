"""The assembly: which tier, which carriers, which threads; start and stop.

    main thread    the brain loop (uvloop): store, sessions, local socket. Alone owns all state
    fault          takes memory for the arena, a segment at a time, and hands each over to the loop
    gRPC, metrics  threads of their own that post to the loop

Start: claim the socket path, open the arena (no memory yet), answer Hello; everything slow comes behind that.
"""

import asyncio
import logging
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.config import Config, arena_nbytes, default_socket_path, format_size
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import TierIOError
from kvstore.core.limits import GRPC_CALL_DEADLINE_S, STOP_DEADLINE_S
from kvstore.dispatcher import Dispatcher
from kvstore.loop_calls import call_on_loop
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server import LocalServer
from kvstore.sessions import Sessions
from kvstore.socket_path import SocketPath
from kvstore.store import Store
from kvstore.tiers.arena import Arena
from kvstore.tiers.host_memory import available_memory_bytes
from kvstore.tiers.slots import SegmentedSlots

if TYPE_CHECKING:
    from kvstore.grpc_server import GrpcServer

logger = logging.getLogger(__name__)

BOOT_ID_NBYTES = 16
_GRPC_GRACE_S = 1.0  # for calls under way at the stop


class Sidecar:
    """One arena, one store, and whoever may speak to it. `on_ready` is called with a one-line description."""

    def __init__(
        self, config: Config, *, clock: Clock | None = None, on_ready: Callable[[str], None] = logger.info
    ) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._on_ready = on_ready
        self._boot_id = secrets.token_bytes(BOOT_ID_NBYTES)
        self._path = SocketPath(config.socket or default_socket_path())
        self._arena = Arena(arena_nbytes(config, available_memory_bytes()), segment_bytes=config.segment_bytes)
        self._stopping = threading.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ConfigError before anything is served."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._path.claim()
        try:
            with self._arena as arena:
                await self._serve(arena, loop, stop)
        finally:
            self._path.release()

    async def _serve(self, arena: Arena, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        slots = SegmentedSlots(arena.nbytes, segment_bytes=arena.segment_bytes, generations=arena.generations)
        store = Store(pinned=slots, limbo_fraction=self._config.limbo_fraction)
        sessions = Sessions(store, loop=loop, clock=self._clock, unverified_drain_s=self._config.unverified_drain_s)
        expiry = _ExpiryTimer(store, loop, self._clock)
        dispatcher = Dispatcher(
            store=store,
            sessions=sessions,
            arena=arena,
            boot_id=self._boot_id,
            clock=self._clock,
            lease_ttl_s=self._config.lease_ttl_s,
            on_leases_changed=expiry.arm,
        )
        descriptors = (arena.fd, arena.generations_fd)
        server = LocalServer(self._path, dispatcher=dispatcher, sessions=sessions, descriptors=descriptors)
        await server.start()
        faulting = threading.Thread(target=self._fault, args=(arena, slots, loop), name="kvstore-fault", daemon=True)
        faulting.start()
        try:
            async with AsyncExitStack() as others:
                await self._start_others(others, dispatcher, sessions, loop)
                self._on_ready(
                    f"kvstore ready socket={self._path.path} arena={format_size(arena.nbytes)} "
                    f"boot_id={self._boot_id.hex()}"
                )
                await stop.wait()
                logger.info("stopping")
        finally:
            self._stopping.set()
            await server.close()
            sessions.close()
            expiry.cancel()
            await asyncio.to_thread(faulting.join, STOP_DEADLINE_S)

    async def _start_others(
        self, others: AsyncExitStack, dispatcher: Dispatcher, sessions: Sessions, loop: asyncio.AbstractEventLoop
    ) -> None:
        """What may come up after the first Hello. Engines wait for none of it, so neither do its imports hold them up."""
        config = self._config
        if config.grpc:
            make = partial(
                _start_grpc,
                self._path.grpc_path,
                config,
                dispatcher=dispatcher,
                sessions=sessions,
                loop=loop,
                clock=self._clock,
            )
            remote = await asyncio.to_thread(make)
            others.push_async_callback(asyncio.to_thread, remote.stop, _GRPC_GRACE_S)
        if config.metrics_port:
            from kvstore.http_server import HttpServer

            def snapshot() -> pb.StatsReply:
                return call_on_loop(loop, GRPC_CALL_DEADLINE_S, dispatcher.stats)

            http = HttpServer(config.metrics_host, config.metrics_port, snapshot)
            http.start()
            others.push_async_callback(asyncio.to_thread, http.stop)

    def _fault(self, arena: Arena, slots: SegmentedSlots, loop: asyncio.AbstractEventLoop) -> None:
        for segment in range(arena.num_segments):
            if self._stopping.is_set():
                return
            try:
                arena.fault_segment(segment)
            except TierIOError as err:
                logger.warning(
                    "arena stays smaller faulted=%s reason=%s", format_size(arena.faulted_nbytes), err.message
                )
                return
            loop.call_soon_threadsafe(slots.add_segments, 1)
        logger.info("arena faulted size=%s", format_size(arena.nbytes))


def _start_grpc(*args: Any, **kwargs: Any) -> "GrpcServer":
    """In a thread: the import alone would hold up the loop for 60 ms."""
    from kvstore.grpc_server import GrpcServer

    server = GrpcServer(*args, **kwargs)
    server.start()
    return server


class _ExpiryTimer:
    """Wakes the loop when the next lease is due, and not before."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._store = store
        self._loop = loop
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def arm(self) -> None:
        """A lease was granted or renewed."""
        due_s = self._store.next_expiry_s()
        if due_s is None or (self._timer is not None and self._due_s <= due_s):
            return  # when the timer fires too early it looks again
        self.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - self._clock.now_s()), self._fire)

    def cancel(self) -> None:
        """Forget it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if num_expired := self._store.expire(self._clock.now_s()):
            logger.info("leases expired count=%d", num_expired)
        self.arm()
