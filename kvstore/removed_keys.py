"""Why a block that is not here went: a memory of bounded size."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import REMEMBERED_REMOVALS

NEVER, EVICTED, DROPPED, DAMAGED, DECLINED = range(5)
REASONS = ("never_stored", "evicted", "dropped", "damaged", "declined")
"""By number; names as in usage.MISSES."""

_REASON_BITS = np.uint64(7)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hashing: engines' own hashes need not be uniform


class RemovedKeys:
    """The last reason for each key, in a table of 2^20 words, 8 MiB (REMEMBERED_REMOVALS): one word a key, at the place that its
    fingerprint names, where a newer key takes the place of an older one.

        63                                   3 2      0
        | fingerprint of namespace and key    | reason |

    So of the last n removals a share of about exp(-n / 2^20) is still known: 61% of the last half million, 99% of the last ten
    thousand. What was forgotten reads as never stored. Two keys share place and fingerprint once in 2^61 pairs. Memory that
    was never written to takes none.
    """

    def __init__(self, *, size: int = REMEMBERED_REMOVALS) -> None:
        assert size & (size - 1) == 0, "a power of two"
        self._table = np.zeros(size, np.uint64)
        self._shift = np.uint64(64 - (size.bit_length() - 1))
        self._is_empty = True

    def add(self, namespace: bytes, hashes: Sequence[bytes], reason: int) -> None:
        """These are gone, or were not taken."""
        if not hashes:
            return
        marks = _fingerprints(namespace, hashes)
        self._table[marks >> self._shift] = (marks & ~_REASON_BITS) | np.uint64(reason)
        self._is_empty = False

    def count(self, namespace: bytes, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of these went for which reason."""
        if not hashes:
            return {}
        if self._is_empty:
            return {REASONS[NEVER]: len(hashes)}
        marks = _fingerprints(namespace, hashes)
        found = self._table[marks >> self._shift]
        reasons = np.where((found ^ marks) & ~_REASON_BITS, 0, found & _REASON_BITS).astype(np.int64)
        return {REASONS[i]: count for i, count in enumerate(np.bincount(reasons).tolist()) if count}


def _fingerprints(namespace: bytes, hashes: Sequence[bytes]) -> NDArray[np.uint64]:
    words = np.frombuffer(b"".join(hashes), "<u8").reshape(len(hashes), -1)
    salt = np.frombuffer(namespace, "<u8")
    marks: NDArray[np.uint64] = (words[:, 0] ^ salt[0]) * _MULTIPLIER + (words[:, 1] ^ salt[1])
    marks ^= marks >> np.uint64(29)
    marks *= _MULTIPLIER
    return marks
