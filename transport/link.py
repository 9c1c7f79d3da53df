"""The one contract by which a node's arena is read by other nodes, whatever carries the bytes (RDMA, TCP, a test's fake).

    node A                                                    node B, the owner
    endpoint = TcpEndpoint(arena A, ...).open()               endpoint = RdmaEndpoint(arena B, gatekeeper=...).open()
    link = endpoint.connect("B", descriptor)    <-- bytes --  endpoint.describe()
    link.read(batch, lease=..., deadline_s=..., on_done=...)  asked nothing, or its gatekeeper is
        each extent of B's arena -> extent of A's arena

Whoever introduces peers (a directory, a static list) carries the descriptor; leases and checksums come with the control
calls. Nothing outside of transport/ depends on which kind of link it is.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from kvstore.core.blocks import Extent

LEASE_NBYTES = 16
"""A lease as the reader shows it to the owner: bytes that the owner chose at random, not its lease id."""


class LinkProblem(enum.StrEnum):
    """Why an extent was not read. Counted by these names."""

    GONE = "gone"  # no connection to the peer, it ended, or another process answers in its place
    TIMEOUT = "timeout"  # the deadline passed
    REFUSED = "refused"  # the owner does not let this lease, or this node, read it
    STALE = "stale"  # the owner's slot has another generation than the one asked for: it was given to another block
    SHORT = "short"  # fewer bytes than asked for, and no error
    CORRUPT = "corrupt"  # the bytes are not those of the checksum
    BROKEN = "broken"  # what the peer says makes no sense: its connections are closed
    OVERLOADED = "overloaded"  # a limit of this side or of the owner is reached; nothing was asked
    STOPPED = "stopped"  # the link is closing; nothing is wrong with the peer


PEER_AT_FAULT = frozenset(
    {LinkProblem.GONE, LinkProblem.TIMEOUT, LinkProblem.SHORT, LinkProblem.CORRUPT, LinkProblem.BROKEN}
)
"""Problems that make a peer suspect. The others say that it is well."""


class ReadExtent(NamedTuple):
    """Bring `nbytes` at `remote_offset` of the peer's arena to `local_offset` of ours. From `read` until its ReadDone is
    settled the local bytes belong to the link alone."""

    read_id: int  # the caller's, for its ReadDone; the link does not look at it
    remote_offset: int
    local_offset: int
    nbytes: int
    generation: int  # of the owner's slot at `remote_offset`; that of another one is STALE
    checksum: int | None = None  # xxh3_64 of the bytes, verified on a link thread; None: the caller does that

    @property
    def remote(self) -> Extent:
        """What is read, as the owner names it."""
        return Extent(self.remote_offset, self.nbytes, self.generation)


class ReadDone(NamedTuple):
    """The end of one ReadExtent. Without a problem its bytes are in the local arena: whole, and right by the checksum, or, if
    there is none, of the generation asked for both before the first and after the last byte was taken. With a problem the
    local bytes are anything. Not `settled`: the link gave up and cannot recall what is in flight, so the local bytes may still
    change; a second ReadDone of the same id, and settled, says when no longer."""

    read_id: int
    problem: LinkProblem | None = None
    settled: bool = True


OnDone = Callable[[list[ReadDone]], None]
"""Gets extents as they end, each once (twice when not settled at first), in any grouping and order. It runs on a link's
threads, several at once, or inside `read` for what is refused there; it must be short and must not raise."""


class LinkStats(NamedTuple):
    """What a link has done, for whoever measures bandwidth: (later - earlier) nbytes / busy_s."""

    nbytes: int  # read without a problem
    num_extents: int  # read without a problem
    busy_s: float  # time in which at least one extent was queued or in flight
    queued_nbytes: int  # asked for and not ended, those in flight included
    problems: Mapping[str, int]  # extents that failed, by LinkProblem; STOPPED is none


class LinkHealth(NamedTuple):
    """`state`: "idle" (nothing is connected, nothing was tried or all went well), "ready" (connected, the last that ended
    went well), "failing" (the last that ended did not; `reason` says why) or "closed"."""

    state: str
    reason: str  # "" unless failing


class Link(Protocol):
    """Reads from one peer's arena. Any thread may call anything; nothing but `close` blocks."""

    @property
    def peer(self) -> str:
        """The name given to `connect`, for logs and metrics."""
        ...

    def read(self, batch: Sequence[ReadExtent], *, lease: bytes, deadline_s: float, on_done: OnDone) -> None:
        """Ask for extents, the first of the batch first; they may overtake one another.

        Each ends with a ReadDone at most `deadline_s` seconds from now (and the wake of a thread), connecting included,
        whatever the peer does. At most MAX_LINK_EXTENTS may be queued on a link: of a batch that goes beyond, all end with
        OVERLOADED. After `close` they end with STOPPED. A failed read is not tried again; only what was asked of a
        connection that had ended while it was idle, or behind an extent whose deadline passed, is asked once more of
        another connection. Extents must lie in the local arena (asserted) and must not overlap another read's local
        bytes.
        """
        ...

    def health(self) -> LinkHealth:
        """How it goes. Asks nobody."""
        ...

    def stats(self) -> LinkStats:
        """What it has done. Asks nobody."""
        ...

    def close(self, deadline_s: float) -> bool:
        """End what is queued or in flight with STOPPED, and wait until no thread or device touches the local arena. False:
        something in flight hangs beyond the deadline; the local arena must stay mapped until the process ends, and its end
        will not be reported. Idempotent. Not to be called from `on_done`."""
        ...


class Endpoint(Protocol):
    """One node's end of a transport: its arena, registered once, from which peers read what they may, and into which its
    links read.

    Constructed with the arena (`memory: [nbytes] uint8`, writable; `generations`: one u64 for each SLOT_ALIGN_BYTES of it,
    the entry at a slot's first page being its generation) and a Gatekeeper. Both arrays belong to the caller and must stay
    mapped until `close` has answered True. A transport whose owner's processor takes no part in a read cannot ask the
    gatekeeper; there who has the descriptor may read, and the reader itself compares the owner's generation table.
    """

    @property
    def kind(self) -> str:
        """ "tcp", "rdma", "loopback": for logs and metrics."""
        ...

    def open(self) -> Self:
        """Register the arena, start to serve it. Raises ConfigError for what is set wrong, PeerUnavailable when the machine
        has not what this kind needs (no such address, no library)."""
        ...

    def describe(self) -> bytes:
        """What a peer needs to `connect`; at most MAX_DESCRIPTOR_BYTES, holds no secret but what it names, and is void once
        this endpoint is closed: a restarted one has another."""
        ...

    def connect(self, peer: str, descriptor: bytes) -> Link:
        """A link to the endpoint that `descriptor` describes, which must be of the same kind. Connects when there is
        something to read, so this neither blocks nor fails for an absent peer. Raises RemoteProtocolError for a descriptor
        that is none. Each call makes a link of its own."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Close all links as Link.close does, and stop to serve. Answers as Link.close does. Idempotent."""
        ...


class Gatekeeper(Protocol):
    """Says which bytes of the arena a lease lets a peer read. Called on serving threads, several at once; must be short."""

    def may_read(self, lease: bytes, extents: Sequence[Extent]) -> bool:
        """Whether `lease` (LEASE_NBYTES, as it came) is alive and grants every one of `extents`, generation included."""
        ...
