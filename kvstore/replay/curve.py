"""The curve of a trace."""

from kvstore.replay.cache import block_key
from kvstore.replay.trace import Trace
from kvstore.reuse_curve import MAX_FOLLOWED, ReuseCurve


def trace_curve(trace: Trace, *, exact: bool = False, max_followed: int = MAX_FOLLOWED) -> ReuseCurve:
    """Hit rates of every capacity, of every block or of a sample."""
    curve = ReuseCurve(max_followed=0 if exact else max_followed)
    hashes = [int.from_bytes(block_key(number)[8:], "little") for number in range(trace.num_blocks)]
    for request in trace.requests:
        curve.request([hashes[number] for number in request.blocks])
    return curve
