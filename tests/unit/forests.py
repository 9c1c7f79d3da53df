"""Random requests over trees of blocks, and the plainest cache that replays them."""

import random


def random_requests(seed: int, *, num_requests: int = 120, num_trees: int = 6, longest: int = 12) -> list[list[int]]:
    """Prefixes of random trees: each request follows a path that exists as far as it likes, then goes on by itself."""
    draw = random.Random(seed)
    children: dict[int, list[int]] = {-1: []}
    requests: list[list[int]] = []
    for _ in range(num_requests):
        path, at = [], -1
        for _ in range(draw.randint(1, longest)):
            known = children[at]
            if known and (draw.random() < 0.75 or (at == -1 and len(known) >= num_trees)):
                at = draw.choice(known)
            else:
                new = len(children) - 1
                known.append(new)
                children[new] = []
                at = new
            path.append(at)
        requests.append(path)
    return requests


class ReferenceCache:
    """Leaf-first LRU by search: the oldest block that no other kept block follows, and that the request does not use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_use: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.clock = 0

    def request(self, blocks: list[int]) -> int:
        hits = next((i for i, block in enumerate(blocks) if block not in self.last_use), len(blocks))
        kept = blocks[:hits]
        for i in range(hits, len(blocks)):
            self.parent[blocks[i]] = blocks[i - 1] if i else -1
        missing = len(blocks) - hits
        while len(self.last_use) + missing > self.capacity:
            parents = {self.parent[block] for block in self.last_use}
            leaves = [block for block in self.last_use if block not in parents and block not in kept]
            if not leaves:
                break
            del self.last_use[min(leaves, key=self.last_use.__getitem__)]
        room = self.capacity - len(self.last_use)
        used = blocks[: hits + min(missing, room)]
        for block in reversed(used):
            self.clock += 1
            self.last_use[block] = self.clock
        return hits
