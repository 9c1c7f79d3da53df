"""Engines' own pools as messages: what a Report tells, checked."""

from kvstore.core.errors import Overloaded
from kvstore.core.keys import unpack_keys
from kvstore.core.limits import MAX_POOL_CAPACITY_BLOCKS, MAX_REPORTED_BLOCKS, MAX_REPORTED_RUNS
from kvstore.field_checks import wrong
from kvstore.presence import HeldRun, PoolReport
from kvstore.proto import kvstore_pb2 as pb


def read_pool_report(request: pb.ReportRequest, digest_nbytes: int) -> PoolReport | None:
    """What it says of the engine's pool; None: nothing."""
    if not (request.cleared or request.removed or request.stored or request.pool_blocks):
        return None
    if len(request.stored) > MAX_REPORTED_RUNS:
        raise _too_many("stored", len(request.stored), "MAX_REPORTED_RUNS", MAX_REPORTED_RUNS)
    nbytes = len(request.removed) + sum(len(run.keys) for run in request.stored)
    if (num_blocks := nbytes // digest_nbytes) > MAX_REPORTED_BLOCKS:
        raise _too_many("stored and removed", num_blocks, "MAX_REPORTED_BLOCKS", MAX_REPORTED_BLOCKS)
    if request.pool_blocks > MAX_POOL_CAPACITY_BLOCKS:
        raise wrong("pool_blocks", request.pool_blocks, f"use at most {MAX_POOL_CAPACITY_BLOCKS}, or 0: not told")
    for run in request.stored:
        if len(run.parent) not in (0, digest_nbytes):
            right = f"use {digest_nbytes}, or none for a first block"
            raise wrong("stored.parent", f"{len(run.parent)} bytes", right)
        if not run.keys:
            raise wrong("stored.keys", "none", "leave the run out")
    return PoolReport(
        request.cleared,
        unpack_keys(request.removed, digest_nbytes),
        [HeldRun(run.parent, unpack_keys(run.keys, digest_nbytes)) for run in request.stored],
        request.pool_blocks,
    )


def _too_many(field: str, num: int, limit: str, most: int) -> Overloaded:
    return Overloaded(f"{field}: {num} in one Report; use at most {most} ({limit})", limit=limit, value=num)
