"""Layer groups of one model, and the one length of a prefix that all of them support.

Layers with full attention need every block of the prefix. Layers with a sliding window need those that cover the window at its
end; recurrent layers need one checkpoint, the state at its end, which their engine keeps every so many tokens. What they do not
need, nobody stores or loads.

    prefix                     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        blocks of 16 tokens, each with its hash
    full                       | # | # | # | # | # | # | # | # |
    window:40                                        | # | # | # |      3 blocks cover 39 tokens
    state, every 64 tokens                     |       #       |        found by the hash of block 7

A state is a window of one block whose blocks are long, so that there is one rule for all of them. The fold is that of vLLM's
hybrid manager (vllm/v1/core/kv_cache_coordinator.py): shorten the prefix until every group has what it needs at its end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from kvstore.core.errors import SpecMismatch
from kvstore.core.keys import KVSpec
from kvstore.core.plans import NOWHERE

_ALL_BLOCKS = 1 << 40
_KIND = re.compile(r"(?:(full)|window:([1-9][0-9]*)|(state))(?:\.\w+)?")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What a group needs of a prefix. Lengths of prefixes are in hashed blocks (HashScheme.block_tokens); a group's own blocks
    may be longer, `span` of those each, and are found by the hash of their last one."""

    span: int = 1
    num_needed: int = _ALL_BLOCKS  # own blocks at the end of a prefix

    @classmethod
    def of(cls, spec: KVSpec) -> Self:
        """Raises SpecMismatch for a `group` that says nothing of the kind."""
        kind = _KIND.fullmatch(spec.group)
        if kind is None:
            raise SpecMismatch(
                f"group: {spec.group!r} is not known; use full, window:<tokens> or state, with .<suffix> where there are several",
                field="group",
                value=spec.group,
            )
        span = spec.block_tokens // spec.hash.block_tokens
        if kind[2]:
            return cls(span, -(-(int(kind[2]) - 1) // spec.block_tokens))
        return cls(span, 1 if kind[3] else _ALL_BLOCKS)

    @property
    def is_full(self) -> bool:
        """Whether it needs all of a prefix."""
        return self.num_needed == _ALL_BLOCKS

    def needed(self, first: int, length: int) -> range:
        """Own blocks that a prefix of `length` needs, if the engine has one of `first` already."""
        end = length // self.span
        return range(min(end, max(first // self.span, end - self.num_needed)), end)

    def keys(self, hashes: Sequence[bytes], blocks: range) -> list[bytes]:
        """Of these own blocks of a sequence."""
        return list(hashes[(blocks.start + 1) * self.span - 1 : blocks.stop * self.span : self.span])

    def longest(self, first: int, length: int, tiers: bytes) -> int:
        """The longest prefix, at most `length`, at whose end all needed blocks are somewhere; `first` if there is no longer one.
        `tiers`: of the own blocks from `first` on, NOWHERE where there is none."""
        base = first // self.span
        end = length // self.span
        if not self.num_needed:
            return max(first, end * self.span)
        for block in range(end - 1, base - 1, -1):
            if tiers[block - base] == NOWHERE:
                end = block
            elif end - block >= self.num_needed:
                break
        return max(first, end * self.span)


class Lookup(Protocol):
    """Asks the store, by a group's number. A store without answer has nothing."""

    def has_run(self, group: int, blocks: range) -> bool:
        """Whether all of these can be read, wherever they are."""
        ...

    def tiers(self, group: int, blocks: range) -> bytes:
        """Where each of them is, if it is here."""
        ...


def longest_prefix(groups: Sequence[LayerGroup], first: int, length: int, lookup: Lookup) -> int:
    """The longest prefix, at most `length`, that all groups support; `first` if there is none longer than the engine's own.

    Each group is asked once, for what it needs at the end, as long as it has that; one that has not, or whose end has moved, once
    more, for all of its blocks.
    """
    good_at: dict[int, int] = {}
    tiers: dict[int, bytes] = {}
    before = -1
    while length != before:
        before = length
        for number, group in enumerate(groups):
            length = length // group.span * group.span
            if length <= first:
                return first
            if number in tiers:
                length = group.longest(first, length, tiers[number])
            elif number not in good_at and lookup.has_run(number, group.needed(first, length)):
                good_at[number] = length
            elif good_at.get(number) != length:
                tiers[number] = lookup.tiers(number, range(first // group.span, length // group.span))
                length = group.longest(first, length, tiers[number])
    return max(first, length)
