"""Which engine gets a request.

round_robin    one after the other
least_loaded   the one with the fewest requests in flight
prefix         the one that is likely to answer first: it has the least text to compute before this request's first token, of
               requests before it and of its own, less what it is likely to have cached

`prefix` passes over an engine that has more than `max_lead` requests in flight more than the least busy one, whatever it has
cached. A prefix that many conversations share, so many that one engine cannot serve them all (a system prompt), counts as
cached everywhere: it will soon be, and a new chat goes where there is room.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from kvstore.core.errors import ConfigError
from kvstore.route.prefix_tree import PrefixTree
from kvstore.route.prompts import Keys

MIN_SHARED = 4
"""Conversations that a prefix needs to count as cached everywhere, besides its share of all."""


class Load(NamedTuple):
    """How busy an engine is."""

    name: str
    num_in_flight: int  # requests whose answers have not ended
    num_pending: int  # chunks to compute for those of them whose answers have not begun


class Choice(NamedTuple):
    """An engine, by its name. `num_cached` chunks of the prompt are likely to be there."""

    name: str
    reason: str
    num_cached: int = 0


class Policy(Protocol):
    """Decides, and learns from what is sent. `loads` are of the engines that may be chosen, at least one."""

    def choose(self, loads: Sequence[Load], keys: Keys, now_s: float) -> Choice:
        """The engine for a prompt with these keys."""
        ...

    def sent(self, name: str, keys: Keys, now_s: float) -> None:
        """The engine was sent the prompt."""
        ...

    def forget(self, name: str) -> None:
        """The engine is down; when it is back it has nothing cached."""
        ...

    def num_chunks(self) -> Mapping[str, int]:
        """Known of each engine."""
        ...


class _Turns:
    """Breaks ties: who was chosen last comes last."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def of(self, load: Load) -> int:
        """Smaller: earlier."""
        return self._last.get(load.name, 0)

    def take(self, load: Load) -> str:
        """It is chosen."""
        self._count += 1
        self._last[load.name] = self._count
        return load.name


class RoundRobin:
    """See the module; learns nothing."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, loads: Sequence[Load], keys: Keys, now_s: float) -> Choice:  # noqa: ARG002 - see Policy
        """See Policy."""
        return Choice(self._turns.take(min(loads, key=self._turns.of)), "round_robin")

    def sent(self, name: str, keys: Keys, now_s: float) -> None:
        """See Policy."""

    def forget(self, name: str) -> None:
        """See Policy."""

    def num_chunks(self) -> Mapping[str, int]:
        """See Policy."""
        return {}


class LeastLoaded(RoundRobin):
    """See the module; ties in turn."""

    def choose(self, loads: Sequence[Load], keys: Keys, now_s: float) -> Choice:  # noqa: ARG002 - see Policy
        """See Policy."""
        least = min(loads, key=lambda load: (load.num_in_flight, self._turns.of(load)))
        return Choice(self._turns.take(least), "least_loaded")


class Prefix:
    """See the module. Reasons: `prefix`, where most of it is cached; `load`, elsewhere; `new`, nobody has any of it."""

    def __init__(self, *, max_lead: int, max_chunks: int, expiry_s: float) -> None:
        self._max_lead = max_lead
        self._make_tree = partial(PrefixTree, max_chunks=max_chunks, expiry_s=expiry_s)
        self._trees: dict[str, PrefixTree] = {}
        self._turns = _Turns()

    def choose(self, loads: Sequence[Load], keys: Keys, now_s: float) -> Choice:
        """See Policy."""
        shared = {load.name: self._tree(load.name).match(keys, now_s) for load in loads}
        num_common = self._num_common(list(shared.values()), len(loads))
        cached = {name: max(len(found), num_common) for name, found in shared.items()}
        least = min(load.num_in_flight for load in loads)

        def rank(load: Load) -> tuple[int, int, int, int]:
            to_compute = load.num_pending + len(keys) - cached[load.name]
            return to_compute, load.num_in_flight, len(self._tree(load.name)), self._turns.of(load)

        chosen = min((load for load in loads if load.num_in_flight - least <= self._max_lead), key=rank)
        most = max(cached.values())
        reason = "new" if most == 0 else "prefix" if cached[chosen.name] == most else "load"
        return Choice(self._turns.take(chosen), reason, len(shared[chosen.name]))

    def sent(self, name: str, keys: Keys, now_s: float) -> None:
        """See Policy."""
        self._tree(name).record(keys, now_s)

    def forget(self, name: str) -> None:
        """See Policy."""
        self._tree(name).clear()

    def num_chunks(self) -> Mapping[str, int]:
        """See Policy."""
        return {name: len(tree) for name, tree in self._trees.items()}

    def _tree(self, name: str) -> PrefixTree:
        if name not in self._trees:
            self._trees[name] = self._make_tree()
        return self._trees[name]

    def _num_common(self, shared: Sequence[Sequence[int]], num_engines: int) -> int:
        """Chunks of the prefix that more conversations share than one engine's part of all."""
        needed = max(MIN_SHARED, sum(tree.num_leaves for tree in self._trees.values()) / num_engines)
        num_common = 0
        for depth in range(max(map(len, shared))):
            if sum(found[depth] for found in shared if len(found) > depth) < needed:
                break
            num_common = depth + 1
        return num_common


NAMES = ("prefix", "least_loaded", "round_robin")


def make_policy(name: str, *, max_lead: int, max_chunks: int, expiry_s: float) -> Policy:
    """One of NAMES; the options are those of `prefix`."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "prefix":
            return Prefix(max_lead=max_lead, max_chunks=max_chunks, expiry_s=expiry_s)
    raise ConfigError(f"policy: {name!r} is not known; use one of {', '.join(NAMES)}", field="policy", value=name)
