"""What the brains order of those who do the I/O between the arena and the drives, and what comes back."""

import enum
from typing import NamedTuple

DRIVE_SHIFT = 48
"""A slot of the NVMe tier is named by one number, `drive << DRIVE_SHIFT | offset`, where `offset` counts from the start of
that drive's slots. So one drive may be 256 TiB, and another drive more or less changes nobody's name."""


class Urgency(enum.IntEnum):
    """Classes of work on a drive, the most urgent first: while there is any of a class, none of a later one is begun."""

    READ = 0  # somebody waits for the block
    PREFETCH = 1  # somebody will
    WRITE = 2


class MoveProblem(enum.StrEnum):
    """Why a move failed. Counted by these names."""

    EIO = "eio"  # the drive says so
    SHORT = "short"  # fewer bytes than asked for, and no error
    CHECKSUM = "checksum"  # the bytes read are not those written: a flip, a tear, somebody else's file
    NO_SPACE = "no_space"  # the file system is full, or a quota or size limit is reached
    READ_ONLY = "read_only"  # the file system does not take writes (any more)
    GONE = "gone"  # the drive is not there, or was given up
    STOPPED = "stopped"  # the tier is closing; nothing is wrong with the block
    CANCELLED = "cancelled"  # nobody waits for the block any more; nothing is wrong with it


FAILURES = frozenset(MoveProblem) - {MoveProblem.CANCELLED}
"""Problems after which a block that was wanted is not there."""

BAD_SLOT = frozenset({MoveProblem.EIO, MoveProblem.SHORT, MoveProblem.CHECKSUM})
"""Problems after which a slot is not trusted again: it is quarantined."""


class BlockRecord(NamedTuple):
    """A block's entry in a drive's index."""

    namespace: bytes  # 16 bytes
    key: bytes  # prefix hash, 16 or 32 bytes
    parent: bytes  # likewise; b"" for the first block of a sequence
    offset: int  # slot, with its drive (DRIVE_SHIFT)
    nbytes: int  # of the block; its slot is this rounded up to SLOT_ALIGN_BYTES
    generation: int  # of the slot: goes up with each write anywhere in the tier
    checksum: int  # xxh3_64 of the block's bytes
    last_use: int  # the index's logical clock: larger is more recent
    hits: int


class Move(NamedTuple):
    """Copy one block between its slot in the arena and its slot on a drive. From its order to its MoveDone both slots belong
    to the move alone (WRITE: the arena's is only read)."""

    move_id: int
    urgency: Urgency
    arena_offset: int
    record: BlockRecord  # WRITE: checksum is 0, whoever writes computes it


class MoveDone(NamedTuple):
    """The end of a move. A READ without a problem has the bytes in the arena, checked against the checksum. A WRITE without
    one has them in the file, and its entry in the index will be durable soon, after the bytes."""

    move_id: int
    checksum: int = 0  # WRITE: of what was written
    problem: MoveProblem | None = None


class Forget(NamedTuple):
    """Remove a block's entry from its drive's index. The slot is used again only when that removal is durable, and never
    when it is to be quarantined."""

    namespace: bytes
    key: bytes
    offset: int
    nbytes: int
    generation: int
    problem: MoveProblem | None = None  # not None: quarantine the slot, for this reason


class Touch(NamedTuple):
    """Newer recency of a block that stays where it is; lost in a crash, which costs nothing but order."""

    namespace: bytes
    key: bytes
    offset: int
    last_use: int
    hits: int
