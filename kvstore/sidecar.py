"""The assembly: which tier, which carriers, which threads; start and stop.

    main thread    the brain loop (uvloop): store, sessions, local socket. Alone owns all state
    fault          takes memory for the arena, a segment at a time, and hands each over to the loop
    nvme           the drives' I/O and their indexes; recovery
    record         writes down what is asked for (kvstore/recorder.py)
    events         sends what changed to routers that subscribed (kvstore/kv_publisher.py)
    gRPC, metrics  threads of their own that post to the loop

Start: claim the socket path, open the arena (no memory yet), answer Hello; everything slow comes behind that.
"""

import asyncio
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, cast

import numpy as np

from kvstore.cluster import Cluster, NoCluster
from kvstore.config import Config, arena_nbytes, default_socket_path, format_size
from kvstore.core.blocks import NO_SLOTS
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.limits import GRPC_CALL_DEADLINE_S, STOP_DEADLINE_S
from kvstore.core.moves import DRIVE_SHIFT, Forget, MoveDone
from kvstore.dispatcher import Dispatcher, SlabSize
from kvstore.eviction import make_policy
from kvstore.kv_events import KVEvents
from kvstore.loop_calls import call_on_loop
from kvstore.loop_lag import LagTimer
from kvstore.mover import Mailbox, Mover, NoMover
from kvstore.proto import kvstore_pb2 as pb
from kvstore.recorder import Recorder
from kvstore.request_traces import RequestTraces
from kvstore.server import LocalServer
from kvstore.sessions import Sessions
from kvstore.socket_path import SocketPath
from kvstore.spill import SpillPolicy, WritePolicy
from kvstore.store import Store
from kvstore.tiers.arena import Arena
from kvstore.tiers.generation_table import GenerationTable
from kvstore.tiers.hbm.memory import DeviceMemory, device_memory
from kvstore.tiers.host_memory import available_memory_bytes
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots, SharedGenerations
from kvstore.tiers.striped import StripedSlots

if TYPE_CHECKING:
    from kvstore.grpc_server import GrpcServer
    from kvstore.otel import OtelTracer
    from kvstore.tiers.nvme.file import BlockFile
    from kvstore.tiers.nvme.recovery import Recovered

logger = logging.getLogger(__name__)

P = ParamSpec("P")
BOOT_ID_NBYTES = 16
_GRPC_GRACE_S = 1.0  # for calls under way at the stop
_MIN_CLOSE_S = 1.0  # for the drives, whatever the others took of STOP_DEADLINE_S
_OPEN_PATIENCE_S = 10.0  # of those who start us: so long may drives take before we say that we are ready


class Sidecar:
    """One arena, one store, and whoever may speak to it. `on_ready` is called with a one-line description; `open_file` opens
    a drive's data file, in place of DirectFile.open."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        on_ready: Callable[[str], None] = logger.info,
        open_file: "Callable[[Path], BlockFile] | None" = None,
    ) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._on_ready = on_ready
        self._open_file = open_file
        self._boot_id = secrets.token_bytes(BOOT_ID_NBYTES)
        self._path = SocketPath(config.socket or default_socket_path())
        self._arena = Arena(arena_nbytes(config, available_memory_bytes()), segment_bytes=config.segment_bytes)
        self._stopping = threading.Event()
        self._stop_by_s = 0.0

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ConfigError before anything is served."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._path.claim()
        try:
            with self._arena as arena, ExitStack() as opened:
                slab = await asyncio.to_thread(_open_slab, self._config, arena, opened)
                await self._serve(arena, slab, loop, stop)
        finally:
            self._path.release()

    async def _serve(
        self, arena: Arena, slab: "_OpenSlab | None", loop: asyncio.AbstractEventLoop, stop: asyncio.Event
    ) -> None:
        config = self._config
        recorder = self._open_recorder(arena)
        drives = _Drives(config, arena, loop, self._open_file) if config.nvme else None
        tracer = await asyncio.to_thread(_open_tracer, config)
        traces = RequestTraces(tracer) if tracer else None
        events = await self._open_events(loop)
        cluster = await self._open_cluster(arena, loop, traces)
        slots = SegmentedSlots(
            arena.nbytes, segment_bytes=arena.segment_bytes, generations=SharedGenerations(arena.generations)
        )
        store = Store(
            pinned=slots,
            nvme=drives.slots if drives else None,
            spill=_spill_policy(config),
            make_policy=make_policy(config.eviction, tenant_quota=config.tenant_quota),
            limbo_fraction=config.limbo_fraction,
            on_event=_to_both(cluster.on_event, events.on_event) if events else cluster.on_event,
            directory=cluster.directory if isinstance(cluster, Cluster) else None,
            slab=slab.slots if slab else None,
        )
        if isinstance(cluster, Cluster):
            cluster.join(store)
        if events:
            events.join(store)
        announce = _to_both(cluster.announce_all, events.announce_all) if events else cluster.announce_all
        mover = drives.mover(store, loop, self._clock, announce, traces) if drives else NoMover()
        sessions = Sessions(store, loop=loop, clock=self._clock, unverified_drain_s=config.unverified_drain_s)
        expiry = _ExpiryTimer(store, loop, self._clock)
        dispatcher = Dispatcher(
            store=store,
            sessions=sessions,
            arena=arena,
            boot_id=self._boot_id,
            clock=self._clock,
            lease_ttl_s=config.lease_ttl_s,
            on_leases_changed=expiry.arm,
            mover=mover,
            cluster=cluster,
            traces=traces,
            recorder=recorder,
            slab=slab.size if slab else None,
        )
        expiry.pump = dispatcher.pump
        lag = LagTimer(loop, self._clock, store.meters.lag)
        server = LocalServer(
            self._path,
            dispatcher=dispatcher,
            sessions=sessions,
            descriptors=(arena.fd, arena.generations_fd),
            slab_descriptors=(slab.memory.fd, slab.generations.fd) if slab else (),
        )
        await server.start()
        faulting = threading.Thread(target=self._fault, args=(arena, slots, loop), name="kvstore-fault", daemon=True)
        faulting.start()
        lag.start()
        try:
            async with AsyncExitStack() as others:
                await _unless(stop, mover.open(_OPEN_PATIENCE_S))
                await self._start_others(others, dispatcher, sessions, cluster, store)
                self._on_ready(
                    f"kvstore ready socket={self._path.path} arena={format_size(arena.nbytes)} "
                    f"boot_id={self._boot_id.hex()}"
                )
                await stop.wait()
                logger.info("stopping")
                self._stop_by_s = loop.time() + STOP_DEADLINE_S
        finally:
            self._stopping.set()
            await server.close()
            sessions.close()
            expiry.cancel()
            lag.stop()
            if events:
                await events.close(_MIN_CLOSE_S)
            if recorder and not await asyncio.to_thread(recorder.close, _MIN_CLOSE_S):
                logger.warning("the recording is not whole: its disk does not take the rest")
            if isinstance(cluster, Cluster) and not await asyncio.to_thread(cluster.close, _MIN_CLOSE_S):
                logger.warning("something still reads into the arena over a link; it stays mapped until the end")
            await mover.stop(max(_MIN_CLOSE_S, self._stop_by_s - loop.time()))
            await asyncio.to_thread(faulting.join, STOP_DEADLINE_S)
            if tracer:
                await asyncio.to_thread(tracer.close, _MIN_CLOSE_S)

    async def _open_cluster(
        self, arena: Arena, loop: asyncio.AbstractEventLoop, traces: RequestTraces | None
    ) -> Cluster | NoCluster:
        """Links listen before there is anything to lend."""
        if not (self._config.peers or self._config.directory):
            return NoCluster()
        cluster = Cluster(self._config, arena, loop, self._clock, traces)
        await asyncio.to_thread(cluster.open)
        return cluster

    async def _open_events(self, loop: asyncio.AbstractEventLoop) -> KVEvents | None:
        if not self._config.events:
            return None
        events = KVEvents(self._config, loop)
        await asyncio.to_thread(events.open)
        return events

    def _open_recorder(self, arena: Arena) -> Recorder | None:
        config = self._config
        if not config.record:
            return None
        header = {
            "arena_bytes": arena.nbytes,
            "segment_bytes": arena.segment_bytes,
            "eviction": config.eviction,
            "tenant_quota": config.tenant_quota,
        }
        recorder = Recorder(Path(config.record), config.record_limit, header)
        recorder.open()
        return recorder

    async def _start_others(
        self,
        others: AsyncExitStack,
        dispatcher: Dispatcher,
        sessions: Sessions,
        cluster: Cluster | NoCluster,
        store: Store,
    ) -> None:
        """What may come up after the first Hello. Engines wait for none of it, so neither do its imports hold them up."""
        config, loop = self._config, asyncio.get_running_loop()
        if config.grpc:
            make = partial(
                _start_grpc,
                self._path.grpc_path,
                config,
                dispatcher=dispatcher,
                sessions=sessions,
                loop=loop,
                clock=self._clock,
                cluster=cluster,
            )
            remote = await asyncio.to_thread(make)
            others.push_async_callback(asyncio.to_thread, remote.stop, _GRPC_GRACE_S)
        if config.metrics_port:
            from kvstore.dashboard import Dashboard, LoopSource
            from kvstore.http_server import HttpServer

            def snapshot() -> pb.StatsReply:
                return call_on_loop(loop, GRPC_CALL_DEADLINE_S, dispatcher.stats)

            dashboard = Dashboard(LoopSource(loop, dispatcher, store, self._clock))
            http = HttpServer(config.metrics_host, config.metrics_port, snapshot, dashboard)
            http.start()
            others.push_async_callback(asyncio.to_thread, http.stop)
            dashboard.start()
            others.callback(dashboard.stop)

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


class _OpenSlab(NamedTuple):
    """Device memory that engines share, and its slots. All of it is there at once."""

    memory: DeviceMemory
    generations: GenerationTable
    slots: SegmentedSlots

    @property
    def size(self) -> SlabSize:
        """What engines are told."""
        return SlabSize(self.memory.device, self.memory.nbytes)


def _open_slab(config: Config, arena: Arena, opened: ExitStack) -> _OpenSlab | None:
    """If it is wanted; closed with `opened`. Blocks. Raises ConfigError."""
    if not config.hbm_slab_bytes:
        return None
    num_segments = config.hbm_slab_bytes // config.segment_bytes
    memory = device_memory(
        config.hbm_device,
        num_segments * config.segment_bytes,
        available_bytes=lambda: available_memory_bytes() - (arena.nbytes - arena.faulted_nbytes),
    )
    opened.callback(memory.close)
    memory.open()
    num_segments = memory.nbytes // config.segment_bytes  # a GPU gives out whole pages of its own
    if not num_segments:
        raise ConfigError(
            f"hbm_slab_bytes: {memory.nbytes} bytes are less than one segment of {config.segment_bytes}; use more",
            field="hbm_slab_bytes",
            value=memory.nbytes,
        )
    generations = GenerationTable(memory.nbytes)
    opened.callback(generations.close)
    try:
        generations.open()
    except OSError as err:
        raise TierIOError(f"slab: no generation table: {err.strerror}", tier="slab", errno=err.errno or 0) from err
    slots = SegmentedSlots(
        num_segments * config.segment_bytes,
        segment_bytes=config.segment_bytes,
        generations=SharedGenerations(generations.table),
    )
    slots.add_segments(num_segments)
    logger.info("slab open device=%s size=%s", memory.device, format_size(memory.nbytes))
    return _OpenSlab(memory, generations, slots)


async def _unless(stop: asyncio.Event, step: Coroutine[Any, Any, None]) -> None:
    """Take a step of the start, or give it up when we are told to stop meanwhile. Raises what it raises."""
    steps = asyncio.ensure_future(step), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        if steps[0].done():
            steps[0].result()
    finally:
        for each in steps:
            each.cancel()


class _Drives:
    """The NVMe tier, made but not open, and its slots. They have no segments before all blocks from before the start are back
    in their slots: until then nobody knows what is free, nor how large the drives are."""

    def __init__(
        self,
        config: Config,
        arena: Arena,
        loop: asyncio.AbstractEventLoop,
        open_file: "Callable[[Path], BlockFile] | None",
    ) -> None:
        from kvstore.tiers.nvme.file import DirectFile
        from kvstore.tiers.nvme.tier import NvmeTier

        self._segment_bytes = arena.segment_bytes
        self._moved: Mailbox[MoveDone] = Mailbox(loop)
        self._forgotten: Mailbox[Forget] = Mailbox(loop)
        self._tier = NvmeTier(
            [Path(directory) for directory in config.nvme],
            config.nvme_bytes,
            segment_bytes=arena.segment_bytes,
            arena=arena.memory,
            on_moved=self._moved.put,
            on_forgotten=self._forgotten.put,
            open_file=open_file or DirectFile.open,
        )
        largest = (1 << DRIVE_SHIFT) // arena.segment_bytes * arena.segment_bytes
        self._generations = CountedGenerations()
        self._each = [
            SegmentedSlots(largest, segment_bytes=arena.segment_bytes, generations=self._generations)
            for _ in config.nvme
        ]
        self.slots = StripedSlots(self._each)

    def mover(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        announce: Callable[[], None],
        traces: RequestTraces | None,
    ) -> Mover:
        """Between the store and the tier. `announce` tells others what the drives have, once it can be found."""

        def on_recovered(recovered: "Recovered") -> None:
            self._on_recovered(recovered)
            loop.call_soon(announce)

        return Mover(
            store,
            self._tier,
            moved=self._moved,
            forgotten=self._forgotten,
            loop=loop,
            clock=clock,
            on_recovered=on_recovered,
            traces=traces,
        )

    def _on_recovered(self, recovered: "Recovered") -> None:
        """What is not in use is free, but on drives that are off."""
        self._generations.restore(NO_SLOTS._replace(generations=np.array([recovered.next_generation - 1], np.uint64)))
        for number, nbytes in enumerate(self._tier.drive_nbytes):
            self._each[number].add_segments(nbytes // self._segment_bytes)
            self.slots.set_open(number, is_open=nbytes > 0)


def _to_both(one: Callable[P, None], other: Callable[P, None]) -> Callable[P, None]:
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        one(*args, **kwargs)
        other(*args, **kwargs)

    return call


def _open_tracer(config: Config) -> "OtelTracer | None":
    if not config.trace:
        return None
    from kvstore.tracing import open_tracer

    return open_tracer("kvstore", **{"service.instance.id": config.node_id or socket.gethostname()})


def _spill_policy(config: Config) -> SpillPolicy:
    policy = cast("WritePolicy", config.nvme_write_policy)
    return SpillPolicy(policy, config.nvme_write_bytes_per_s, config.nvme_write_bytes_per_day)


def _start_grpc(*args: Any, **kwargs: Any) -> "GrpcServer":
    """In a thread: the import alone would hold up the loop for 60 ms."""
    from kvstore.grpc_server import GrpcServer

    server = GrpcServer(*args, **kwargs)
    server.start()
    return server


class _ExpiryTimer:
    """Wakes the loop when the next lease is due, and not before."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.pump: Callable[[], None] = lambda: None  # called when leases have expired
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
            self.pump()
        self.arm()
