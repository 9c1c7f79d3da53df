"""The most that any policy could hit, for it knows what comes."""

import heapq
import math
from collections.abc import Sequence


def most_hits(requests: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Leading blocks hit by a tier of `num_blocks` that keeps, of what it has and what a request brings, those that are wanted
    again soonest, heads before tails; what is never wanted again it does not keep. (Belady's MIN with bypass.)"""
    later: dict[int, list[int]] = {}  # by block: the requests that use it, last one first
    for number in range(len(requests) - 1, -1, -1):
        for block in requests[number]:
            later.setdefault(block, []).append(number)
    kept: dict[int, float] = {}  # by block: the request that wants it next
    latest: list[tuple[float, int, int]] = []  # heap of (-next use, -depth, block), some outdated
    hits = 0
    for blocks in requests:
        hits += next((depth for depth, block in enumerate(blocks) if block not in kept), len(blocks))
        for depth, block in enumerate(blocks):
            later[block].pop()
            next_use = later[block][-1] if later[block] else math.inf
            kept.pop(block, None)
            if next_use < math.inf:
                kept[block] = next_use
                heapq.heappush(latest, (-next_use, -depth, block))
        while len(kept) > num_blocks:
            negative, _, block = heapq.heappop(latest)
            if kept.get(block) == -negative:
                del kept[block]
    return hits
