"""What a directory tells a node about the others: who is alive, and who holds which blocks. Answered from memory.

Blocks are named by fingerprints: 63 bits made from the namespace and the prefix hash. Two blocks that share one cost a vain
question, never a wrong token: whoever is asked for a block is asked with its whole key. A holder is told as *how far it goes*:
a node that holds a block holds the blocks before it (eviction takes leaves first, and a parent is published before its child),
so one number says what a node has of a prefix. That also lets a large cluster publish only every `sample_every`-th block, the
same ones on every node, since the fingerprint chooses: the answer is then short by `sample_every` blocks on average, and the
owner, who is asked for all of them, makes up for it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.keys import NAMESPACE_NBYTES

Fingerprints = NDArray[np.uint64]
"""63 bits of identity in the upper bits; the lowest bit is 0 (in a log it says stored or removed)."""

MAX_NODE_BYTES = 16 << 10
"""A node's description. A longer one is refused, so that a thousand of them fit a message."""

MAX_HOLDINGS = 16
"""Nodes in one answer of `locate`: those that go farthest. Enough to try another, and another."""

MAX_SAMPLE_EVERY = 1 << 14
"""A power of two up to this; the bits that choose are none of those that the table keeps."""

CLOSE_DEADLINE_S = 3.0
"""A directory told to close is done by then; what its thread is in ends at its own deadline."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_IDENTITY = np.uint64(0xFFFF_FFFF_FFFF_FFFE)


class LinkDescriptor(NamedTuple):
    """How to reach a node's arena by one kind of link (`rdma`, `tcp`). `payload` is that link's own, opaque here."""

    kind: str
    payload: bytes


class Node(msgspec.Struct, frozen=True):
    """A node as it describes itself. A restarted node has the same `node_id` and a larger `epoch`: what its earlier life
    published is void. `control_address` is where its peers' calls go; `links` in the order of its preference. It travels as a
    msgpack map, in which a reader passes over fields that it does not know."""

    node_id: str
    epoch: int
    control_address: str
    links: tuple[LinkDescriptor, ...] = ()
    sample_every: int = 1

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """The inverse of `encode`. Raises RemoteProtocolError when it is no node's description."""
        if len(encoded) > MAX_NODE_BYTES:
            raise RemoteProtocolError(
                f"node: {len(encoded)} bytes; at most {MAX_NODE_BYTES}", field="node", value=len(encoded)
            )
        try:
            return msgspec.msgpack.decode(encoded, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as err:
            raise RemoteProtocolError(f"node: {err}", field="node", value=encoded[:64].hex()) from err


class Holding(NamedTuple):
    """`node` is believed to hold the first `num_blocks` of the blocks that were asked for, `num_blocks` >= 1. May be stale."""

    node: Node
    num_blocks: int


class DirectoryFigures(NamedTuple):
    """For metrics. Counters grow; the others are as of now."""

    num_nodes: int  # others that are alive
    num_entries: int  # (block, node) pairs known of others
    table_nbytes: int
    own_blocks: int  # published and not withdrawn, of those that are sampled
    sent_bytes: int  # counter: payload to the server or to peers that asked
    received_bytes: int  # counter
    failures: int  # counter: calls that failed or passed their deadline
    resyncs: int  # counter: others' or own state taken or given anew
    dropped_updates: int  # counter: own updates lost because nobody took them off the queue
    last_refresh_s: float  # time of the last whole refresh by the directory's clock; 0: never


class Directory(Protocol):
    """The others' nodes and blocks, and the place to publish our own. One background thread does all remote calls.

    Everything but `start` and `close` may be called from any one thread (the brain loop), takes no lock that is held during
    a remote call, and never waits. Losing the directory's server or a peer raises nothing here: answers stay as last known.
    """

    def start(self) -> None:
        """Begin to refresh and publish in the background. Once."""
        ...

    def close(self) -> None:
        """Withdraw the node where that takes one call, and end the thread within CLOSE_DEADLINE_S. Idempotent."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """The others that are alive as far as is known, ours not among them."""
        ...

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> tuple[Holding, ...]:
        """Who holds how much of a prefix: `hashes` in prefix order. Longest first, ties by node id, at most MAX_HOLDINGS.
        O(1) per key from memory."""
        ...

    def publish(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """These blocks can be had from us now. Queued; told to the others in batches."""
        ...

    def withdraw(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """These blocks cannot be had from us any more. Queued as well; until it is known, others ask in vain."""
        ...

    @property
    def resync_needed(self) -> bool:
        """Updates were lost (the queue was full, oldest dropped): call `resync`, then `publish` all that is held, in slices."""
        ...

    def resync(self) -> None:
        """Forget all that was published; the caller publishes anew. Others' view of us is replaced when they next refresh."""
        ...

    def figures(self) -> DirectoryFigures:
        """For metrics; cheap."""
        ...


def fingerprints(namespace: bytes, hashes: Sequence[bytes]) -> Fingerprints:
    """One for each of `hashes` (16 or 32 bytes each, all alike). 512 take some 25 us.

    Engines' own hashes are used verbatim and need not be uniform, so the bits are mixed (splitmix64's finaliser, Steele et al.
    2014); the namespace enters before, and the two halves of a hash's first 16 bytes both count.
    """
    assert len(namespace) == NAMESPACE_NBYTES
    if not hashes:
        return np.empty(0, np.uint64)
    words = np.frombuffer(b"".join(hashes), "<u8").reshape(len(hashes), -1)
    salt = np.frombuffer(namespace, "<u8")
    mixed: Fingerprints = (words[:, 0] ^ salt[0]) + (words[:, 1] ^ salt[1]) * _GOLDEN
    mixed = (mixed ^ (mixed >> _S30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _S27)) * _MIX_2
    mixed ^= mixed >> _S31
    mixed &= _IDENTITY
    return mixed
