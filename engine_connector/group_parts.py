"""What a scheduler side asks the store for each layer group of a request."""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

from kvstore.core.plans import NOWHERE, Match
from kvstore.engine_connector.layer_groups import LayerGroup, longest_prefix
from kvstore.engine_connector.protocol import NO_PAGE, PageTables
from kvstore.engine_connector.session import Link, StoreSession


class GroupPart(NamedTuple):
    """What a prefix needs of one group."""

    group: int
    keys: list[bytes]
    first_needed: int  # of `keys`
    pages: tuple[int, ...]  # of keys[first_needed:]; none if no table was given


class GroupParts:
    """The layer groups of one model, in the order of its specs. `leader` is one with full attention, or None."""

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        assert groups
        self.groups = tuple(groups)
        self.leader = next((i for i, group in enumerate(groups) if group.is_full), None)
        self.is_plain = len(groups) == 1 and self.leader == 0  # any prefix of a hit is a hit
        self.alignment = math.lcm(*(group.span for group in groups))

    def tables(self, block_ids: PageTables) -> Sequence[Sequence[int]]:
        """One for each group."""
        return cast("Sequence[Sequence[int]]", (block_ids,) if len(self.groups) == 1 else block_ids)

    def of_prefix(
        self, keys: list[bytes], first: int, last: int, tables: Sequence[Sequence[int]] = ()
    ) -> list[GroupPart]:
        """Of each group that needs something for a prefix of `last` blocks, of which the engine has `first`; the leader's comes
        first, and has the keys before `first` too."""
        parts = []
        for number, group in enumerate(self.groups):
            needed = group.needed(first, last)
            before = needed.start if group.is_full else 0
            if needed:
                part_keys = group.keys(keys, range(needed.start - before, needed.stop))
                pages = tables[number][needed.start : needed.stop] if tables else ()
                parts.append(GroupPart(number, part_keys, before, tuple(pages)))
        return sorted(parts, key=lambda part: part.group != self.leader)

    def first_to_save(self, number: int, table: Sequence[int], num_saved: int, num_full: int) -> int:
        """The first own block of a group that is to be saved when `num_full` of them are full and `num_saved` are saved: of what
        a prefix that ends here needs, as far back as the engine has pages."""
        group = self.groups[number]
        if group.is_full:
            return num_saved
        needed = group.needed(num_saved * group.span, num_full * group.span)
        return next((block + 1 for block in reversed(needed) if table[block] == NO_PAGE), needed.start)

    def longest_prefix(self, session: StoreSession, link: Link, keys: list[bytes], first: int, length: int) -> int:
        """See layer_groups.longest_prefix; the leader was asked, and has all of `length`. At most two Matches for each other."""
        return longest_prefix(self.groups, first, length, _StoreLookup(session, link, self, keys))


class _StoreLookup:
    """layer_groups.Lookup for one sequence."""

    def __init__(self, session: StoreSession, link: Link, parts: GroupParts, keys: list[bytes]) -> None:
        self._session, self._link, self._parts, self._keys = session, link, parts, keys

    def has_run(self, group: int, blocks: range) -> bool:
        """See Lookup. One Match."""
        if group == self._parts.leader or not blocks:
            return True
        match = self._ask(group, blocks, each=False)
        return match is not None and match.num_blocks == len(blocks)

    def tiers(self, group: int, blocks: range) -> bytes:
        """See Lookup. One Match."""
        if group == self._parts.leader:
            return bytes(len(blocks))
        match = self._ask(group, blocks, each=True)
        return bytes([NOWHERE]) * len(blocks) if match is None else match.tiers

    def _ask(self, group: int, blocks: range, *, each: bool) -> Match | None:
        keys, namespace = self._parts.groups[group].keys(self._keys, blocks), self._link.namespaces[group]
        return self._session.ask(
            self._link, lambda client, _: client.match(namespace, keys, further_group=True, each=each)
        )
