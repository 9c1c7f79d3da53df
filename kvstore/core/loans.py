"""What the brains order of those who fetch blocks from other nodes, and what comes back."""

import enum
from typing import NamedTuple


class LoanProblem(enum.StrEnum):
    """Why a block did not come from a peer. Counted by these names; those of a link (transport/link.py) have the same ones."""

    ABSENT = "absent"  # the owner has not got it (any more): what was known of it was old
    UNREACHABLE = "unreachable"  # no answer to the question for a lease
    REFUSED = "refused"  # the owner does not lend to us, or not now
    GONE = "gone"
    TIMEOUT = "timeout"
    STALE = "stale"
    SHORT = "short"
    CORRUPT = "corrupt"
    BROKEN = "broken"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"  # nobody waits for it any more
    STOPPED = "stopped"


PEER_AT_FAULT = frozenset(
    {
        LoanProblem.UNREACHABLE,
        LoanProblem.GONE,
        LoanProblem.TIMEOUT,
        LoanProblem.SHORT,
        LoanProblem.CORRUPT,
        LoanProblem.BROKEN,
    }
)
"""Problems that make a peer suspect: it is not asked for a while."""


class Fetch(NamedTuple):
    """Bring blocks of one sequence from a node into slots of the arena, which belong to the fetch alone until it is settled."""

    fetch_id: int
    node_id: str
    namespace: bytes
    keys: tuple[bytes, ...]  # from the first block of the sequence on; wanted are those from `first` on
    first: int
    arena_offsets: tuple[int, ...]  # of the wanted ones
    nbytes: int  # of a block
    deadline_s: float  # from now on
    traceparent: str = ""  # of the request that it is for, if that is traced (core/traces.py)


class FetchDone(NamedTuple):
    """The end of one block of a fetch. Without a problem its bytes are in the arena, and are what the owner's checksum says.
    Not `settled`: they may still be written to; a second one, settled, says when no longer."""

    fetch_id: int
    block: int  # its place in Fetch.arena_offsets
    problem: LoanProblem | None = None
    settled: bool = True
