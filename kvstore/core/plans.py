"""What the brains answer: values, computed at once, carried out by others."""

import enum
from typing import NamedTuple

from kvstore.core.blocks import Extent, KeyStatus, SlotArrays


class MatchWish(NamedTuple):
    """What an engine tells of a request, so that Match can plan it. Fields are those of PlanWish in kvstore.proto."""

    request_id: str  # the engine's own, for Explain
    num_tokens: int  # of the whole prompt
    first_needed: int = 0  # blocks before it are on the engine already
    chunk_tokens: int = 0  # of the engine's prefill; 0: unchunked
    compute_wait_s: float = 0.0  # until the engine could begin to compute
    compute_price: float = 0.0  # what a second of the engine costs others, in seconds; 0: idle
    both_ends: bool = False  # it can compute at the front while blocks arrive from the back
    deadline_s: float = 0.0  # it waits no longer for a load; 0: no limit
    label: str = ""  # what a person calls the prompt


NOWHERE = 255
"""Instead of a tier's number: of a key that cannot be read."""


class Match(NamedTuple):
    """The longest prefix that can be read, from whatever tier. May be stale at once; owns nothing."""

    num_blocks: int
    tiers: bytes  # for each block the number of its best tier (TIERS); or for each key that was asked for (match_each)
    plan: "FetchPlan | None" = None  # when there was a wish
    plan_id: int = 0  # of that plan; never 0


class FetchPlan(NamedTuple):
    """How much of a match to fetch, from what was measured; the rest is computed. A forecast: nothing is held by it."""

    num_blocks: int  # to fetch, behind the tokens that the engine has
    both_ends: bool  # fetch them from the back while the engine may compute at the front, until the two meet
    front_blocks: (
        int  # so many of them the engine should get to; where others wait for it, no more while the fetch is in time
    )
    fetch_s: float  # until the last of the blocks would be there, if nothing were computed
    recompute_s: float  # of all behind the context, with nothing fetched
    total_s: float  # what this plan is expected to take until all but the generated tokens are computed
    deadline_s: float  # wait no longer than this for the fetch, from its start; 0.0: there is no fetch
    reason: str  # in words, with the numbers that decided


class SlabUse(enum.IntEnum):
    """What a lease may do with a block's slot in the slab."""

    NONE = 0  # it has none
    READ = 1  # the block is there too
    FILL = 2  # copy it there


class SlabGrant(NamedTuple):
    """What a read lease has of the slab."""

    uses: bytes  # for each block a SlabUse
    slots: SlotArrays  # of those that have one, in order


class ReadGrant(NamedTuple):
    """A read lease: slot i holds `keys[first_needed + i]` and stays readable until the lease ends."""

    lease_id: int  # 0: nothing was granted, there is nothing to release
    expires_s: float  # on the store's clock
    num_blocks: int  # length of the prefix that can be read, in blocks from the first key
    slots: SlotArrays  # of keys[first_needed:num_blocks]; as columns, since 512 objects cost as much as the rest of the call
    block_nbytes: int
    ready: bytes  # for each slot 1: its bytes are there; 0: they are on their way
    slab: SlabGrant | None = None  # None: it was not asked for, or there is no slab

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The slots as objects."""
        return self.slots.extents(self.block_nbytes)


class WriteGrant(NamedTuple):
    """A write lease: `slots` are those of the GRANTED keys, in order."""

    lease_id: int  # 0: nothing was granted
    expires_s: float
    statuses: tuple[KeyStatus, ...]  # one per key
    slots: SlotArrays
    block_nbytes: int
    declined_reason: str  # "" | "no_space" | "orphan" | "limbo_limit"

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The slots as objects."""
        return self.slots.extents(self.block_nbytes)


class Prefetch(NamedTuple):
    """Blocks that are being brought to RAM for nobody yet."""

    num_blocks: int  # length of the prefix that is held, in blocks from the first key
    num_started: int  # moves that this call began


class NearMiss(NamedTuple):
    """Another namespace of the tenant that could have been meant (same weights or shape), were it not for some fields."""

    namespace: bytes
    differing_fields: tuple[str, ...]
    num_blocks: int


class NamespaceInfo(NamedTuple):
    """What Hello tells about one spec's namespace."""

    namespace: bytes
    block_nbytes: int
    num_blocks: int  # READY at that time, in the tier that has most of them
    near_misses: tuple[NearMiss, ...]


TIERS = ("pinned", "nvme", "peer", "hbm")
"""Tier numbers as they travel in Match replies."""
