"""The curve of a trace."""

import numpy as np

from kvstore.replay.cache import block_key
from kvstore.replay.trace import Trace
from kvstore.reuse_curve import MAX_FOLLOWED, ReuseCurve


def trace_curve(trace: Trace, *, exact: bool = False, max_followed: int = MAX_FOLLOWED) -> ReuseCurve:
    """Hit rates of every capacity in blocks, of every block or of a sample."""
    curve = ReuseCurve(max_followed=0 if exact else max_followed)
    hashes = np.array(
        [int.from_bytes(block_key(number)[8:], "little") for number in range(trace.num_blocks)], np.uint64
    )
    for request in trace.requests:
        curve.request(hashes[request.blocks])
    return curve
