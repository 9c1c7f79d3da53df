"""A drive's index as the others see it: changes are queued at once and made durable in groups, after the bytes they speak of."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvstore.core.errors import TierIOError
from kvstore.core.limits import INDEX_COMMIT_ENTRIES, INDEX_COMMIT_INTERVAL_S, INDEX_RETRY_S
from kvstore.core.moves import BlockRecord, Forget, MoveProblem, Touch
from kvstore.tiers.nvme.file import problem_of
from kvstore.tiers.nvme.records import encode_namespace
from kvstore.tiers.nvme.tables import IndexTables, Op

logger = logging.getLogger(__name__)

_MAX_TRANSACTION_OPS = 32768
"""lmdb refuses a transaction that dirties 131,072 pages; an entry dirties a leaf and seldom more."""

_IDLE_S = 60.0
_S_PER_HOUR = 3600


class DriveIndex:
    """The one thread that writes a drive's tables.

        queue:  put put touch forget put ...     any thread, never blocks
        group:  when INDEX_COMMIT_ENTRIES wait, or the first has waited INDEX_COMMIT_INTERVAL_S
                1. sync_data()                   if there are puts: their bytes are durable first
                2. one transaction, in order     durable on return
                3. on_forgotten(forgets)         now their slots may be used again

    A group that fails is kept and tried again every INDEX_RETRY_S; `problem` says why, so that the tier stops writing
    meanwhile, and touches are dropped, so that the queue stays bounded by what is on the drive.

    `on_forgotten` is called on the index's thread and must be short. `wall_s` is the time of day, for bytes per hour.
    """

    def __init__(
        self,
        tables: IndexTables,
        *,
        name: str,
        sync_data: Callable[[], None],
        on_forgotten: Callable[[Sequence[Forget]], None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._tables = tables
        self._sync_data = sync_data
        self._on_forgotten = on_forgotten
        self._wall_s = wall_s
        self._thread = threading.Thread(target=self._run, name=f"kvstore-nvme-{name}-index", daemon=True)
        self._namespaces: dict[bytes, bytes] = {}  # encoded; written with the first block of each
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[Op] = []  # guarded by _lock, as what follows
        self._num_queued = 0  # since start, as the two below
        self._num_durable = 0
        self._hurry_to = 0  # as long as fewer are durable, no waiting for company
        self._closing = False
        self._silent = False
        self._ended = False
        self._problem: tuple[MoveProblem, str] | None = None
        self._num_failures = 0
        self._callback = threading.Lock()  # held while on_forgotten runs

    @property
    def problem(self) -> tuple[MoveProblem, str] | None:
        """Why the last group could not be committed, and in words; None when it was."""
        return self._problem

    @property
    def num_failures(self) -> int:
        """Groups that failed, each attempt counted."""
        return self._num_failures

    def start(self) -> None:
        """From now on the tables belong to the thread; what was queued before is committed."""
        self._thread.start()

    def namespace(self, namespace: bytes, tenant: str, canonical: bytes) -> None:
        """Say what a namespace is, before its first `put`."""
        self._namespaces[namespace] = encode_namespace(tenant, canonical)

    def put(self, records: Iterable[BlockRecord]) -> None:
        """Entries of blocks whose bytes are written; durable within a group commit."""
        records = list(records)
        for record in records:
            assert record.namespace in self._namespaces, f"namespace {record.namespace.hex()} was not announced"
        self._append(records)

    def forget(self, forgets: Iterable[Forget]) -> None:
        """Remove entries; `on_forgotten` gets them back when that is durable."""
        self._append(forgets)

    def touch(self, touches: Iterable[Touch]) -> None:
        """Write down recency, unless commits fail at the moment."""
        if self._problem is None:
            self._append(touches)

    def redo(self, ops: Iterable[Op]) -> None:
        """Queue whatever changes."""
        self._append(ops)

    def flush(self, deadline_s: float) -> bool:
        """Wait until all that is queued now is durable. False: not by the deadline."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            wanted = self._hurry_to = self._num_queued
            self._changed.notify_all()
            while self._num_durable < wanted:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self._ended:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, deadline_s: float) -> bool:
        """Commit what is queued, end the thread, close the tables; no callback after it returns. Idempotent.

        False: something was not durable by the deadline, or a commit hangs; then the tables stay open.
        """
        end_s = time.monotonic() + deadline_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(max(end_s - time.monotonic(), 0.0))
        with self._callback:
            self._silent = True
        if self._thread.is_alive():
            return False
        self._tables.close()
        return self._num_durable == self._num_queued

    def is_alive(self) -> bool:
        """Does its thread run? After `close` only when a commit hangs."""
        return self._thread.is_alive()

    def _append(self, ops: Iterable[Op]) -> None:
        with self._changed:
            before = len(self._queue)
            self._queue.extend(ops)
            self._num_queued += len(self._queue) - before
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._commit_groups()
        except BaseException as err:
            self._problem = MoveProblem.GONE, f"its thread ended: {err!r}"  # a bug of ours; no writes any more
            raise
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _commit_groups(self) -> None:
        while group := self._next_group():
            problem = self._commit(group)
            with self._changed:
                if problem is None:
                    self._num_durable += len(group)
                else:
                    self._queue[:0] = group
                self._problem = problem
                self._num_failures += problem is not None
                self._changed.notify_all()
                if problem is not None and self._closing:
                    return
                if problem is not None:
                    self._changed.wait_for(lambda: self._closing, INDEX_RETRY_S)

    def _next_group(self) -> list[Op]:
        """Waits for one; empty: closed and nothing left."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait(_IDLE_S)
            self._changed.wait_for(self._is_due, INDEX_COMMIT_INTERVAL_S)
            group = self._queue[:_MAX_TRANSACTION_OPS]
            del self._queue[:_MAX_TRANSACTION_OPS]
            return group

    def _is_due(self) -> bool:
        return self._closing or self._num_durable < self._hurry_to or len(self._queue) >= INDEX_COMMIT_ENTRIES

    def _commit(self, group: list[Op]) -> tuple[MoveProblem, str] | None:
        try:
            if any(type(op) is BlockRecord for op in group):
                self._sync_data()
            if self._problem is not None:
                self._tables.reopen()
            self._tables.commit(group, self._namespaces, int(self._wall_s()) // _S_PER_HOUR)
        except OSError as err:
            return self._failed(problem_of(err), f"sync of the data file: {err}", len(group))
        except TierIOError as err:
            os_error = OSError(int(err.fields["errno"]), err.message)
            return self._failed(problem_of(os_error), err.message, len(group))
        if self._problem is not None:
            logger.warning("nvme index %s: committed again", self._tables.path)
        if forgets := [op for op in group if type(op) is Forget]:
            with self._callback:
                if not self._silent:
                    self._on_forgotten(forgets)
        return None

    def _failed(self, problem: MoveProblem, reason: str, num_ops: int) -> tuple[MoveProblem, str]:
        if self._problem != (problem, reason):
            logger.error("nvme index %s: %d changes wait: %s", self._tables.path, num_ops, reason)
        return problem, reason
