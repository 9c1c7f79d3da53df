"""The curve of a trace."""

import math

import numpy as np

from kvstore.core.blocks import slot_nbytes
from kvstore.replay.cache import block_key
from kvstore.replay.trace import ReplayStore, ReplayUse, Trace
from kvstore.reuse_curve import MAX_FOLLOWED, Hashes, ReuseCurve


def trace_curve(trace: Trace, *, exact: bool = False, max_followed: int = MAX_FOLLOWED) -> ReuseCurve:
    """Hit rates of every capacity in blocks, of every block or of a sample."""
    curve = ReuseCurve(max_followed=0 if exact else max_followed)
    hashes = _hashes(trace)
    for request in trace.requests:
        curve.request(hashes[request.blocks])
    return curve


def recording_curve(trace: Trace, *, exact: bool = False) -> tuple[ReuseCurve, int]:
    """Of a recording, in tokens over the room of slots in RAM, and how many bytes a unit of its capacity has."""
    curve = ReuseCurve(max_followed=0 if exact else MAX_FOLLOWED)
    hashes = _hashes(trace)
    slots = {step.space: slot_nbytes(step.space.block_nbytes) for step in trace.steps}
    unit = math.gcd(*slots.values())
    for step in trace.steps:
        size, tokens = slots[step.space] // unit, step.space.block_tokens
        if isinstance(step, ReplayStore):
            curve.stored(hashes[step.blocks], size=size)
            continue
        if isinstance(step, ReplayUse):
            curve.used(hashes[step.blocks], size=size)
            continue
        extra = float(step.num_tokens - len(step.blocks) * tokens)
        had, found = step.num_had, step.num_stored
        curve.wanted(hashes[step.blocks], size=size, value=float(tokens), num_had=had, num_found=found, extra=extra)
    return curve, unit


def _hashes(trace: Trace) -> Hashes:
    return np.array([int.from_bytes(block_key(number)[8:], "little") for number in range(trace.num_blocks)], np.uint64)
