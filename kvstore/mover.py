"""Between the brain and the drives: orders go out to threads that do the I/O, what came of them comes back to the loop.

    loop thread                                               the tier's threads
    store.take_orders -> Mover.pump -> tier.submit, cancel, forget -> queues of the drives and of their indexes
    store.finish_moves <- Mover <- Mailbox (one wake-up for many reports) <- on_moved, on_forgotten

Nothing here waits for a drive but `stop`, within its deadline.
"""

import asyncio
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvstore.core.clock import Clock
from kvstore.core.errors import ConfigError, Overloaded
from kvstore.core.keys import KVSpec
from kvstore.core.limits import MAX_REPORTS_PER_TURN, MAX_TOUCHES_PER_TURN, RECENCY_FLUSH_S, RESTORE_SLICE_BLOCKS
from kvstore.core.moves import Forget, Move, MoveDone, MoveProblem, Touch
from kvstore.request_traces import RequestTraces
from kvstore.store import Store

if TYPE_CHECKING:
    from kvstore.tiers.nvme.probe import DriveSpeed
    from kvstore.tiers.nvme.recovery import Recovered, RecoveredBlocks
    from kvstore.tiers.nvme.tier import DriveHealth

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the store is asked for what time alone brings: budgets, the write-back cleaner."""

_DRAIN_FRACTION = 0.5  # of the time to stop, for moves ordered before; the rest is for the group commit
_CLOSE_FRACTION = 0.25  # of it, for that commit, however much recency there is to write down
_CLOSE_GRACE_S = 0.1  # for a tier that used up its time
T = TypeVar("T")


class Drives(Protocol):
    """The tier that carries orders out (tiers/nvme/tier.py). `open`, `recover` and `close` block, the others return at once."""

    def open(self) -> None:
        """Take the drives. Raises ConfigError."""
        ...

    def recover(self) -> "Recovered":
        """What is on the drives."""
        ...

    def submit(self, moves: Iterable[Move]) -> None:
        """Carry them out; each is reported once."""
        ...

    def hasten(self, offsets: Iterable[int]) -> None:
        """Prefetches of these slots that were not begun become reads."""
        ...

    def cancel(self, offsets: Iterable[int]) -> None:
        """Reads and prefetches of these slots that were not begun end with CANCELLED."""
        ...

    def probe(self) -> "DriveSpeed | None":
        """How fast the drives read, all together. Blocks, within a deadline; None: cannot be said."""
        ...

    def forget(self, forgets: Iterable[Forget]) -> None:
        """Remove entries; each is reported when that is durable."""
        ...

    def touch(self, touches: Iterable[Touch]) -> None:
        """Write recency down; not reported."""
        ...

    def add_namespace(self, namespace: bytes, tenant: str, canonical: bytes) -> None:
        """Make its spec durable, before the first entry of it."""
        ...

    def drives(self) -> "tuple[DriveHealth, ...]":
        """How each drive is."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Commit what is written; no report after it returns. False: not by the deadline."""
        ...


class Mailbox(Generic[T]):
    """What other threads have for the loop. However much comes in between two turns of the loop, it wakes up once; however
    much there is, it takes no more than MAX_REPORTS_PER_TURN in a turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._values: deque[T] = deque()
        self._take: Callable[[list[T]], None] | None = None
        self._awake = False

    def open(self, take: Callable[[list[T]], None]) -> None:
        """Call `take` on the loop's thread with what comes, and with what came before."""
        self._take = take
        if self._values and not self._awake:
            self._awake = True
            self._loop.call_soon(self._deliver)

    def close(self) -> None:
        """Whatever comes from now on is dropped. Loop thread."""
        self._take = lambda _: None

    def put(self, values: Sequence[T]) -> None:
        """Any thread; never blocks. No lock: a value that is put before `_deliver` clears the flag is taken by it, and one that
        is put afterwards sees the flag cleared."""
        self._values.extend(values)
        if not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # what asyncio raises for a closed loop
                logger.debug("report after the end dropped count=%d", len(values))

    def _deliver(self) -> None:
        self._awake = False
        if self._take is None or not self._values:
            return
        taken = [self._values.popleft() for _ in range(min(len(self._values), MAX_REPORTS_PER_TURN))]
        if self._values:
            self._awake = True
            self._loop.call_soon(self._deliver)
        self._take(taken)


class NoMover:
    """Where there are no drives: nothing is ordered, nothing comes."""

    async def open(self, patience_s: float) -> None:
        """Nothing to open."""

    def pump(self) -> None:
        """Nothing to order."""

    def drives(self) -> "tuple[DriveHealth, ...]":
        """None."""
        return ()

    def counters(self) -> Mapping[str, int]:
        """None."""
        return {}

    async def stop(self, deadline_s: float) -> None:
        """Nothing to finish."""


class _Phase(enum.Enum):
    OPENING = enum.auto()
    RECOVERING = enum.auto()
    MOVING = enum.auto()
    OFF = enum.auto()  # for good: opening or recovery failed


class Mover:
    """Carries the store's orders to `tier`, whose callbacks are `moved.put` and `forgotten.put`. Loop thread only.

    `wall_s` is the time of day, for budgets by the day, which outlive this process. `on_recovered` is called when every
    block is back in the store, before the store begins to order; how fast the drives read it hears beside that.

        OPENING -> RECOVERING -> MOVING        ->OFF from the first two, for good
    """

    def __init__(
        self,
        store: Store,
        tier: Drives,
        *,
        moved: Mailbox[MoveDone],
        forgotten: Mailbox[Forget],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_recovered: "Callable[[Recovered], None]",
        wall_s: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
        traces: RequestTraces | None = None,
    ) -> None:
        self._traces = traces
        self._store = store
        self._tier = tier
        self._moved = moved
        self._forgotten = forgotten
        self._loop = loop
        self._clock = clock
        self._on_recovered = on_recovered
        self._wall_s = wall_s
        self._tick_s = tick_s
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._flush_due_s = clock.now_s() + RECENCY_FLUSH_S
        self._recovery: asyncio.Task[None] | None = None
        self._phase = _Phase.OPENING
        self._off_reason = ""

    async def open(self, patience_s: float) -> None:
        """Open the drives, recover, let the store order: all in the background, however long it takes.

        Waits only for the drives to be open, and at most for `patience_s`, to raise ConfigError. Whatever else goes wrong, or
        goes wrong later, leaves the drives off, which `drives` tells.
        """
        self._moved.open(self._take_moved)
        self._forgotten.open(self._take_forgotten)
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        opening = in_daemon_thread("kvstore-nvme-open", self._tier.open)
        self._recovery = self._loop.create_task(self._recover(opening))
        await asyncio.wait([opening], timeout=patience_s)
        if not opening.done():
            logger.warning("drives are not open after %g s; RAM is served meanwhile", patience_s)
        elif isinstance(err := opening.exception(), ConfigError):
            raise err

    def pump(self) -> None:
        """Hand out what the store has decided since the last time. Cheap when that is nothing."""
        orders = self._store.take_orders(self._clock.now_s())
        for namespace in orders.namespaces:
            self._tier.add_namespace(*namespace)
        if orders.forgets:
            self._tier.forget(orders.forgets)
        if orders.hastens:
            self._tier.hasten(orders.hastens)
        if orders.moves:
            self._num_in_flight += len(orders.moves)
            if self._traces is not None:
                self._traces.ordered(orders.moves, self._clock.now_s())
            self._tier.submit(orders.moves)
        if orders.cancels:
            self._tier.cancel(orders.cancels)

    def drives(self) -> "tuple[DriveHealth, ...]":
        """How each drive is, for the store: not ready before the store has its blocks."""
        drives = self._tier.drives()
        match self._phase:
            case _Phase.OPENING:
                return tuple(drive._replace(state="recovering", reason="being opened") for drive in drives)
            case _Phase.RECOVERING:
                return tuple(
                    drive._replace(state="recovering") if drive.state == "ready" else drive for drive in drives
                )
            case _Phase.OFF:
                return tuple(drive._replace(state="off", reason=self._off_reason) for drive in drives)
        return drives

    def counters(self) -> Mapping[str, int]:
        """What went wrong on all drives, by reason, under the names that metrics show."""
        problems = dict.fromkeys((problem.value for problem in MoveProblem), 0)
        for drive in self._tier.drives():
            for reason, count in drive.problems.items():
                problems[reason] = problems.get(reason, 0) + count
        return {f"nvme_problems_{reason}_total": count for reason, count in problems.items()}

    async def stop(self, deadline_s: float) -> None:
        """Finish what was ordered, write recency down, let the tier commit; all within the deadline."""
        until_s = self._loop.time() + deadline_s
        if self._timer is not None:
            self._timer.cancel()
        if not await self._stop_recovery(deadline_s):
            logger.warning("still recovering; the drives are left as they are")
            return
        await self._drain(deadline_s * _DRAIN_FRACTION)
        if self._phase is _Phase.MOVING:
            while self._write_recency() and self._loop.time() < until_s - deadline_s * _CLOSE_FRACTION:
                pass
        self._moved.close()
        self._forgotten.close()
        left_s = max(0.0, until_s - self._loop.time())
        closing = in_daemon_thread("kvstore-nvme-close", lambda: self._tier.close(left_s))
        done, _ = await asyncio.wait([closing], timeout=left_s + _CLOSE_GRACE_S)
        if not done or not closing.result():
            logger.warning("drives not closed within %g s; what was not committed is lost", deadline_s)

    # --- reports --------------------------------------------------------------------------------------------------------

    def _take_moved(self, done: list[MoveDone]) -> None:
        self._num_in_flight -= len(done)
        if self._traces is not None:
            self._traces.moved(done, self._clock.now_s())
        self._store.finish_moves(done, self._clock.now_s())
        self.pump()
        if not self._num_in_flight:
            self._idle.set()

    def _take_forgotten(self, forgets: list[Forget]) -> None:
        self._store.finish_forgets(forgets)
        self.pump()

    # --- time -----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        now_s = self._clock.now_s()
        self._store.tick(now_s)
        if now_s >= self._flush_due_s and self._phase is _Phase.MOVING and not self._write_recency():
            self._flush_due_s = now_s + RECENCY_FLUSH_S
        self.pump()

    def _write_recency(self) -> bool:
        """A turn's worth of what changed; whether there may be more."""
        touches = self._store.take_touches()
        if touches:
            self._tier.touch(touches)
        return len(touches) == MAX_TOUCHES_PER_TURN

    async def _drain(self, deadline_s: float) -> None:
        """Wait for the moves under way, and for those that the store orders behind them."""
        self.pump()
        if self._num_in_flight:
            self._idle.clear()
            waiting = self._loop.create_task(self._idle.wait())
            await asyncio.wait([waiting], timeout=deadline_s)
            waiting.cancel()

    # --- recovery -------------------------------------------------------------------------------------------------------

    async def _recover(self, opening: asyncio.Future[None]) -> None:
        started_s = self._clock.now_s()
        try:
            await opening
            self._phase = _Phase.RECOVERING
            num_blocks = await self._restore(await in_daemon_thread("kvstore-nvme-recover", self._tier.recover))
        except ConfigError as err:
            self._turn_off(err.message)
        except Exception as err:  # outermost frame of a task, whatever is wrong with the drives or us: RAM is served on
            logger.exception("recovery crashed")
            self._turn_off(f"recovery failed: {err}")
        else:
            self._phase = _Phase.MOVING
            self.pump()
            in_daemon_thread("kvstore-nvme-probe", self._tier.probe).add_done_callback(self._take_speed)
            logger.info("recovered blocks=%d seconds=%.2f", num_blocks, self._clock.now_s() - started_s)

    def _take_speed(self, probing: "asyncio.Future[DriveSpeed | None]") -> None:
        if (err := probing.exception()) is not None:
            logger.error("the drives' speed is not known: probing crashed", exc_info=err)
        elif (speed := probing.result()) is not None:
            logger.info("drives read latency_s=%.6f bytes_per_s=%.0f", speed.latency_s, speed.bytes_per_s)
            self._store.set_tier_speed(speed.latency_s, speed.bytes_per_s)

    def _turn_off(self, reason: str) -> None:
        logger.error("drives are off reason=%s", reason)
        self._phase = _Phase.OFF
        self._off_reason = reason

    async def _restore(self, recovered: "Recovered") -> int:
        """Into the store, a slice at a time, with other work of the loop in between; how many blocks."""
        num_blocks = 0
        for blocks in recovered.namespaces:
            num_blocks += await self._restore_namespace(blocks)
        for offset, nbytes in (*recovered.quarantined, *recovered.waiting):
            self._store.restore_quarantined(offset, nbytes)
        self._on_recovered(recovered)
        self._store.start_spilling(recovered.written, self._wall_s() - self._clock.now_s())
        return num_blocks

    async def _restore_namespace(self, blocks: "RecoveredBlocks") -> int:
        spec = KVSpec.from_canonical(blocks.canonical)
        try:
            for start in range(0, len(blocks.keys), RESTORE_SLICE_BLOCKS):
                self._store.restore(spec, blocks.tenant, _slice(blocks, start, start + RESTORE_SLICE_BLOCKS))
                await asyncio.sleep(0)
        except Overloaded as err:  # by the first slice, of too many namespaces: as if these blocks had been evicted
            logger.warning("%d blocks on the drives given up: %s", len(blocks.keys), err.message)
            self._tier.forget(_forgets(spec.namespace(blocks.tenant), blocks))
            return 0
        return len(blocks.keys)

    async def _stop_recovery(self, deadline_s: float) -> bool:
        """Whether nothing of it runs any more."""
        if self._recovery is None or self._recovery.done():
            return True
        done, _ = await asyncio.wait([self._recovery], timeout=deadline_s)
        if not done:
            self._recovery.cancel()
        return bool(done)


def in_daemon_thread(name: str, function: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `function` in a thread of its own that does not hold up the end of the process, unlike the executor's: a drive
    that hangs may keep it for ever."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except Exception as err:  # noqa: BLE001 - carried over to whoever waits, and raised there
            future.set_exception(err)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(future)


def _slice(blocks: "RecoveredBlocks", start: int, stop: int) -> "RecoveredBlocks":
    return blocks._replace(
        keys=blocks.keys[start:stop],
        parents=blocks.parents[start:stop],
        offsets=blocks.offsets[start:stop],
        generations=blocks.generations[start:stop],
        checksums=blocks.checksums[start:stop],
        last_use=blocks.last_use[start:stop],
        hits=blocks.hits[start:stop],
    )


def _forgets(namespace: bytes, blocks: "RecoveredBlocks") -> list[Forget]:
    columns = blocks.keys, blocks.offsets.tolist(), blocks.generations.tolist()
    return [
        Forget(namespace, key, offset, blocks.nbytes, generation)
        for key, offset, generation in zip(*columns, strict=True)
    ]
