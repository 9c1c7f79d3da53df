"""What an engine's own prefix cache holds, told to the sidecar in batches: a helper for any connector.

    engine   stored(parent, keys), removed(keys), cleared()    as it happens; costs a dict entry
    step     send_due(session)                                  at most one call in POOL_REPORT_INTERVAL_S, or at once

The sidecar forgets what it was told when the connection ends, so everything is told anew over each new one. What came and went
between two reports is not told at all.
"""

from collections.abc import Sequence

from kvstore.client import Client
from kvstore.core.clock import Clock
from kvstore.core.limits import MAX_REPORTED_BLOCKS, MAX_REPORTED_RUNS, POOL_REPORT_INTERVAL_S
from kvstore.engine_connector.session import Link, StoreSession

_MAX_GONE = 1 << 17  # told and removed since; an engine that forgets faster than it may tell tells all anew


class PoolReports:
    """One engine's pool. Its thread alone calls. Keys are those of Match and Reserve: block hashes of the first spec."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_blocks = 0  # that the pool can hold; 0: not known
        self._held: dict[bytes, bytes] = {}  # by key: the key before it
        self._new: dict[bytes, None] = {}  # of those held, what the sidecar does not know; the oldest first
        self._gone: dict[bytes, None] = {}  # not held any more, which it does not know
        self._clears = False  # all that it knows is void
        self._link: Link | None = None  # over which that was told
        self._refused: Link | None = None  # whose sidecar wants no reports
        self._sent_s = clock.now_s() - POOL_REPORT_INTERVAL_S

    def stored(self, parent: bytes, keys: Sequence[bytes]) -> None:
        """The pool has these now, behind `parent` (b"": keys[0] is the first of its sequence)."""
        for key in keys:
            self._held[key] = parent
            if key in self._gone:
                del self._gone[key]
            else:
                self._new[key] = None
            parent = key

    def removed(self, keys: Sequence[bytes]) -> None:
        """It has not any more."""
        for key in keys:
            if self._held.pop(key, None) is None:
                continue
            if key in self._new:
                del self._new[key]
            else:
                self._gone[key] = None
        if len(self._gone) > _MAX_GONE:
            self._tell_anew()

    def cleared(self) -> None:
        """It has nothing any more."""
        self._held.clear()
        self._tell_anew()

    def send_due(self, session: StoreSession, *, at_once: bool = False) -> None:
        """Tell a batch, if it is time and there is something to tell; `at_once`: no step may come for a while. Waits at most for
        one call's deadline."""
        link, now_s = session.link, self._clock.now_s()
        if link is not self._link:
            self._link = link
            self._tell_anew()
            self._clears = False  # over a new connection nothing is known
        idle = not (self._new or self._gone or self._clears)
        if link is None or link is self._refused or idle:
            return
        if now_s - self._sent_s < POOL_REPORT_INTERVAL_S and not at_once:
            return
        self._sent_s = now_s
        removed = self._take_gone()
        stored = self._take_new(MAX_REPORTED_BLOCKS - len(removed))
        cleared, self._clears = self._clears, False

        def tell(client: Client, link: Link) -> bool:
            client.report_pool(
                link.namespace, cleared=cleared, removed=removed, stored=stored, num_blocks=self.num_blocks
            )
            return True

        if not session.ask(link, tell):
            self._refused = link  # or it is lost, and another one is another

    def _tell_anew(self) -> None:
        self._clears = True
        self._gone.clear()
        self._new = dict.fromkeys(self._held)

    def _take_gone(self) -> list[bytes]:
        taken = [key for key, _ in zip(self._gone, range(MAX_REPORTED_BLOCKS), strict=False)]
        for key in taken:
            del self._gone[key]
        return taken

    def _take_new(self, room: int) -> list[tuple[bytes, list[bytes]]]:
        """Runs of blocks that follow each other, the oldest first."""
        runs: list[tuple[bytes, list[bytes]]] = []
        for num_taken, key in enumerate(self._new):
            parent = self._held[key]
            follows = bool(runs) and runs[-1][1][-1] == parent
            if num_taken == room or (not follows and len(runs) == MAX_REPORTED_RUNS):
                break
            if follows:
                runs[-1][1].append(key)
            else:
                runs.append((parent, [key]))
        for _, keys in runs:
            for key in keys:
                del self._new[key]
        return runs
