"""What the scheduler side remembers of a request, and the moves it can make.

            match                   accept_load                finish_load
    SEEN  ---------->  SEEN  ---------------------> LOADING ------------------> SEEN
      |                                                                           |
      |  reserve -> save job -> commit, any number of times while not LOADING     |
      +------------------------------ finished -----------------------------------+--> forgotten when nothing is pending

Invariants, by which tests/unit/test_scheduler_side.py goes:

R1 A request has at most one load at a time, and none of its blocks is saved while it loads, nor computed, unless the load is
   filled from both ends; only in the step in which a load by layers starts may its blocks be offered, because the engine drops
   those saves unless the load was good (R9).
R2 Every lease taken for a request is in `load` or in one save job, and leaves it by release, commit or abort; when the
   sidecar could not be told, the Renew after the next connection ends it by not naming it.
R3 `num_saved` counts a prefix that the store holds or will hold, as far as its group needs it; never a block behind a declined
   one.
R4 A request whose load failed or was late in any block is not matched again.
R5 A request is forgotten only after request_finished and when nothing is pending, so that its pages outlive every copy.
R6 Blocks on a slower tier are prefetched for a request that waits, once: when it is asked about a second time without having
   got pages since the first. Asked about once it may load in the same step, and then Acquire brings them.
R7 A prompt that is to be pinned is pinned when all its full blocks are committed or held for others; again at the next
   occasion if the store had not all of them yet; for the last time, as far as the store has it, when it is forgotten.
R8 A tail is saved in the step that ends with the prompt's last token, behind the prompt's full blocks, and counts as none.
R9 A load goes by layers only if all of its blocks were in RAM when they were leased, and none was lost. Blocks whose save came
   to nothing are offered again, as soon as the request is computed again.
R10 A load is filled from both ends only if the plan said so, no block was lost and none is a tail. What the engine computes
   meanwhile is offered to the store once the load is over.
R11 A save that is not reported in SAVE_DEADLINE_S is given up: its pages are the engine's, its blocks are never committed,
   and its lease is neither renewed nor said to be over, so that its slots stay in limbo until the report comes after all, or
   the engine is dead.
R12 With several layer groups a load has a lease for each group that needs blocks, all of them whole, or is all lost. Of a group
   with a window, or of states, only what a prefix that ends with the step needs is saved, each time without a parent: what is
   before it need not be there. Tails, layers and both ends are for models of one group.
"""

import enum
from dataclasses import dataclass, field

from kvstore.core.plans import FetchPlan
from kvstore.core.traces import Span


class Prefetch(enum.Enum):
    """Whether a waiting request's blocks were asked for (R6). Begins anew when it gets pages, and with another boot."""

    NOT_DUE = enum.auto()
    DUE = enum.auto()  # matched on a slower tier; when it is asked about again
    SENT = enum.auto()


@dataclass(slots=True)
class PendingLoad:
    """A load that the worker has not reported: read leases whose blocks it copies into pages, or nothing but lost blocks
    (no lease)."""

    lease_ids: tuple[int, ...]  # of each layer group of which blocks are loaded
    boot_id: bytes
    block_ids: tuple[int, ...]  # all pages of the load, the lost ones too
    started_s: float = 0.0
    in_ram: bool = False  # all of them, when they were leased
    fills: tuple[int, ...] = ()  # blocks of the one lease that are to be copied into the slab
    by_layers: bool = False
    from_back: bool = False
    span: Span | None = None  # of a traced request's load


@dataclass(slots=True)
class PendingSave:
    """A write lease whose pages the worker is copying into slots."""

    lease_id: int
    boot_id: bytes
    request_id: str
    group: int
    first_block: int  # index in the request of the first key asked for
    keys: tuple[bytes, ...]  # the granted ones, as the job's moves
    started_s: float
    given_up: bool = False  # R11
    traceparent: str = ""  # of a traced request


@dataclass(frozen=True, slots=True)
class PinWish:
    """The hashes of the prompt's full blocks, and for how long they are to be kept."""

    keys: tuple[bytes, ...]
    pin_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """What match said last: blocks behind those on the engine, and why so many."""

    first_block: int = 0  # blocks on the engine when match was asked
    plan: FetchPlan | None = None  # None: all that were found
    plan_id: int = 0
    tiers: bytes = b""  # where each block behind `first_block` was found


@dataclass(slots=True)
class SavedBlocks:
    """How far a request's blocks of one layer group are with the store, in own blocks of the group."""

    num_saved: int = 0  # R3
    num_offered: int = 0  # that were full when reserve was last asked


@dataclass(slots=True)
class RequestState:
    """One live request. `boot_id` names the sidecar that `saved`, `prefetch` and `pinned` are true for."""

    pin: PinWish | None = None
    pinned: bool = False  # all of it
    offer: Offer = Offer()
    load: PendingLoad | None = None
    load_failed: bool = False
    save_job_ids: set[int] = field(default_factory=set)
    saved: list["SavedBlocks"] = field(default_factory=list)  # of each layer group
    prefetch: Prefetch = Prefetch.NOT_DUE
    boot_id: bytes = b""
    finished: bool = False

    @property
    def pending(self) -> bool:
        """Whether a page of the request may still be read or written."""
        return self.load is not None or bool(self.save_job_ids)

    def follow_boot(self, boot_id: bytes) -> None:
        """The sidecar of another boot has nothing in memory, and may have nothing at all: offer it all again."""
        if self.boot_id != boot_id:
            self.boot_id = boot_id
            for saved in self.saved:
                saved.num_saved = saved.num_offered = 0
            self.prefetch = Prefetch.NOT_DUE
            self.pinned = False
