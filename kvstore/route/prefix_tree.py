"""Which prefixes one engine has been sent lately: a radix tree over chunks of text.

A node stands for a prefix, by its key (prompts); the engine is taken to have what it has been sent, until it has been sent
`max_chunks` of something else, or nothing of it for `expiry_s`. Whoever touches a node touches those above it afterwards, so
the node touched longest ago is a leaf, and what is left is always whole prefixes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    parent: int | None  # its key; None: a prompt's first chunk
    used_s: float
    num_children: int = 0
    num_leaves: int = 1  # at or below it: conversations that share it


class PrefixTree:
    """Of one engine. Plain code; `now_s` never goes back."""

    def __init__(self, *, max_chunks: int, expiry_s: float) -> None:
        self._max_chunks = max_chunks
        self._expiry_s = expiry_s
        self._nodes: OrderedDict[int, _Node] = OrderedDict()  # touched longest ago first
        self.num_leaves = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[int], now_s: float) -> list[int]:
        """For each chunk of the longest known prefix: how many conversations share the prefix that ends with it."""
        self._expire(now_s)
        shared = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            shared.append(node.num_leaves)
        return shared

    def record(self, keys: Sequence[int], now_s: float) -> None:
        """The engine has been sent this."""
        self._expire(now_s)
        keys = keys[: self._max_chunks]
        parent = None
        for key in keys:
            if key not in self._nodes:
                self._add(key, parent, now_s)
            parent = key
        for key in reversed(keys):
            self._nodes[key].used_s = now_s
            self._nodes.move_to_end(key)
        while len(self._nodes) > self._max_chunks:
            self._remove_oldest()

    def clear(self) -> None:
        """The engine has forgotten everything."""
        self._nodes.clear()
        self.num_leaves = 0

    def check(self) -> None:
        """Every invariant. O(everything); for tests."""
        assert len(self._nodes) <= self._max_chunks
        children: dict[int | None, list[int]] = {}
        order = {key: at for at, key in enumerate(self._nodes)}
        for key, node in self._nodes.items():
            children.setdefault(node.parent, []).append(key)
            if node.parent is not None:
                assert order[node.parent] > order[key]
                assert self._nodes[node.parent].used_s >= node.used_s
        for key, node in self._nodes.items():
            below = children.get(key, [])
            assert node.num_children == len(below)
            assert node.num_leaves == (sum(self._nodes[child].num_leaves for child in below) or 1)
        assert self.num_leaves == sum(self._nodes[key].num_leaves for key in children.get(None, []))

    def _add(self, key: int, parent: int | None, now_s: float) -> None:
        above = None if parent is None else self._nodes[parent]
        if above is None or above.num_children:  # else a leaf grows longer
            self._count_leaf(parent, 1)
        if above is not None:
            above.num_children += 1
        self._nodes[key] = _Node(parent, now_s)

    def _count_leaf(self, key: int | None, change: int) -> None:
        self.num_leaves += change
        while key is not None:
            node = self._nodes[key]
            node.num_leaves += change
            key = node.parent

    def _expire(self, now_s: float) -> None:
        while self._nodes and next(iter(self._nodes.values())).used_s + self._expiry_s <= now_s:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        _, node = self._nodes.popitem(last=False)
        assert node.num_children == 0
        above = None if node.parent is None else self._nodes[node.parent]
        if above is not None:
            above.num_children -= 1
        if above is None or above.num_children:
            self._count_leaf(node.parent, -1)
