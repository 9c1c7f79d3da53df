"""A store that is sometimes there: one client, a breaker in front of it, and a thread that brings it back.

The engine's thread never waits for a connection. `ask` either reaches a connected sidecar within the call's deadline or
answers None at once; the first failure opens the breaker, and from then on a background thread alone tries to connect,
with growing pauses, until it succeeds.

            ask fails (deadline, end of file)
      UP ------------------------------------> DOWN
       ^                                        | background thread: pause, connect, Hello
       +----------------------------------------+
"""

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvstore.client import Client, ClientArena
from kvstore.client_slab import ClientSlab
from kvstore.core.errors import KVStoreError, PeerUnavailable
from kvstore.core.limits import RECONNECT_BACKOFF_S

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STOP_DEADLINE_S = 5.0  # for the background thread to notice close(); a connect attempt is shorter


class Link(NamedTuple):
    """One connection: what was learnt of the sidecar when it was made. Published whole, so that nobody can take the number
    of one connection for the boot of another."""

    number: int  # another number means that the sidecar ended what it had granted
    boot_id: bytes
    namespaces: tuple[bytes, ...]  # of the specs, in their order

    @property
    def namespace(self) -> bytes:
        """Of the first spec."""
        return self.namespaces[0]


class StoreSession:
    """Owns `client` until close(). `ask` may be called from any thread.

    Whoever asks takes `link` first and decides by that one value: an `ask` for a link that is gone answers None.
    """

    def __init__(self, client: Client, *, backoff_s: tuple[float, float] = RECONNECT_BACKOFF_S) -> None:
        self._client = client
        self._first_pause_s, self._longest_pause_s = backoff_s
        self._num_links = 0
        self._link: Link | None = None
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._hurry = threading.Event()  # cuts the pause before the next attempt
        self._followed = b""
        self._awaited = b""
        self._last_problem = ""
        self._thread = threading.Thread(target=self._reconnect_loop, name="kvstore-reconnect", daemon=True)

    def start(self) -> None:
        """Try once to connect, within the client's connect deadline, then leave it to the background thread."""
        if not self._try_connect():
            self._lost.set()
        self._thread.start()

    @property
    def link(self) -> Link | None:
        """The connection that answered last; None while the sidecar is away. Only a failing `ask` of the engine's thread
        ends it (or `follow`), so that thread's next `ask` speaks to this boot or to nobody."""
        return self._link

    @property
    def boot_id(self) -> bytes:
        """Boot id of the sidecar that answers; b"" while none does."""
        link = self._link
        return b"" if link is None else link.boot_id

    @property
    def live_boot_id(self) -> bytes:
        """Boot id of the sidecar that holds its end of the connection now; b"" when none does. Asks nothing and waits for
        nobody; any thread. The sidecar of a `link` may have ended a moment ago; this one has not."""
        return self._client.boot_id if self._client.alive else b""

    def arena(self, boot_id: bytes) -> ClientArena | None:
        """The arena of that boot, or None when the sidecar has been restarted since. Whoever keeps the reference keeps the
        mapping, so a copy under way never loses its memory."""
        arena = self._client.arena
        return arena if arena is not None and arena.boot_id == boot_id else None

    def slab(self, boot_id: bytes) -> ClientSlab | None:
        """Likewise the slab; None too where the sidecar has none, or it could not be mapped."""
        slab = self._client.slab
        return slab if slab is not None and slab.boot_id == boot_id else None

    def ask(self, link: Link | None, call: Callable[[Client, Link], T]) -> T | None:
        """The answer of `call`, or None when `link` is not the present one or the store says no. Raises no KVStoreError."""
        if link is None or link is not self._link:
            return None
        try:
            return call(self._client, link)
        except PeerUnavailable as err:
            self._on_lost(err)
        except KVStoreError as err:
            logger.info("store declined code=%s fields=%s reason=%s", err.code, err.fields, err.message)
        return None

    def follow(self, boot_id: bytes) -> None:
        """Another process of this engine speaks to the sidecar of that boot (b"": to none). If we do not, connect to it, in
        the background: a session that only maps the arena asks nothing, so it never learns of a restart by itself."""
        if boot_id in (b"", self.boot_id, self._followed):
            return
        self._followed = self._awaited = boot_id
        self._link = None
        self._hurry.set()
        self._lost.set()

    def awaits(self, boot_id: bytes) -> bool:
        """Whether `follow` has just made us connect to that boot's sidecar, and the first attempt has not ended yet. The arena
        and `live_boot_id` change meanwhile; ask this first, and what they say afterwards is not about to change."""
        return boot_id == self._awaited != b""

    def close(self) -> None:
        """Stop reconnecting and close the connection. Safe to call twice."""
        self._closing.set()
        self._hurry.set()
        self._lost.set()
        self._link = None
        if self._thread.is_alive():
            self._thread.join(_STOP_DEADLINE_S)
        self._client.close()

    def _on_lost(self, err: KVStoreError) -> None:
        if self._link is not None:
            self._link = None
            logger.warning("store lost, recomputing until it answers again reason=%s", err.message)
        self._lost.set()

    def _reconnect_loop(self) -> None:
        pause_s = self._first_pause_s
        while not self._closing.is_set():
            self._lost.wait()  # set by whoever loses the sidecar, and by close()
            if self._hurry.wait(pause_s):
                self._hurry.clear()
            if self._closing.is_set():
                return
            connected = self._try_connect()
            self._awaited = b""
            pause_s = self._first_pause_s if connected else min(2 * pause_s, self._longest_pause_s)

    def _try_connect(self) -> bool:
        try:
            self._client.connect()
        except KVStoreError as err:
            # Said once for each reason: an engine may run for days without a sidecar, and tries every few seconds.
            level = logging.DEBUG if err.message == self._last_problem else logging.WARNING
            logger.log(level, "store not reached, recomputing code=%s reason=%s", err.code, err.message)
            self._last_problem = err.message
            return False
        self._last_problem = ""
        self._followed = b""  # a worker that was told of another boot meanwhile is told again at its next step
        self._lost.clear()
        self._num_links += 1
        namespaces = tuple(space.namespace for space in self._client.namespaces)
        self._link = Link(self._num_links, self._client.boot_id, namespaces)
        self._report_near_misses()
        return True

    def _report_near_misses(self) -> None:
        for space in self._client.namespaces:
            logger.info("store connected namespace=%s num_blocks=%d", space.namespace.hex(), space.num_blocks)
            for miss in space.near_misses:
                logger.warning(
                    "store holds blocks we cannot share num_blocks=%d differing_fields=%s",
                    miss.num_blocks,
                    ",".join(miss.differing_fields),
                )
