"""Blocks from other nodes: whom to ask, what is on its way, and whom not to ask again for a while.

    peer has it             order                                finish: bytes checked
    (directory)  ------------------------->  pinned ARRIVING  ------------------------->  pinned READY, evicted first
                                                   | failed: another holder, or nobody
                                                   v
                                                 NONE

Everything here is a decision or the account of one; the I/O is done by whoever takes the orders.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.core.blocks import Extent
from kvstore.core.limits import MAX_FETCH_BLOCKS, PEER_FIRST_PATIENCE_S, PEER_PATIENCE_S, PEER_RETRY_S
from kvstore.core.loans import PEER_AT_FAULT, Fetch, FetchDone, LoanProblem
from kvstore.costs import LoadCost, TierQuote
from kvstore.index import BlockIndex, Namespace, Rows
from kvstore.inventory import Inventory
from kvstore.meters import Meters
from kvstore.placements import ARRIVING, LEAVING
from kvstore.tier_speed import TierSpeed

MAX_REMEMBERED_PEERS = 8192
"""Nodes whose speed and failures are known. Of more, half of those of which nothing is under way are forgotten."""

_PRIOR = LoadCost(0.002, 1e9)  # of a peer that was never asked: a 10 Gb/s network
_FARTHEST_FRACTION = 0.8  # a holder that has so much of what the farthest has may be chosen for its speed
_FETCH_BYTES = 64 << 20  # of one fetch: read well before its loan ends, and while the next one is being lent
_KNOWN_AFTER = 8  # fetches, which bring an estimate of latency from what it was believed to be to fifty times that
_PROBE_BLOCKS = 8  # asked of a peer that failed, until it is well again


class Holder(Protocol):
    """As much of transport/directory.Holding as is needed here."""

    @property
    def node(self) -> "Named":
        """Who."""
        ...

    @property
    def num_blocks(self) -> int:
        """How far it goes, from the first of the keys asked about."""
        ...


class Named(Protocol):
    """A node's name."""

    @property
    def node_id(self) -> str:
        """Unique in the cluster."""
        ...


class Locator(Protocol):
    """Who holds what, from memory (transport/directory.py)."""

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> Sequence[Holder]:
        """Farthest first."""
        ...


class Offer(NamedTuple):
    """A node that may have blocks of a prefix that we have not."""

    node_id: str
    num_blocks: int  # from the first key of the sequence on
    quote: TierQuote


class FetchOrders(NamedTuple):
    """What is to be done now: fetches, and then the numbers of those that nobody waits for any more."""

    fetches: tuple[Fetch, ...]
    cancels: tuple[int, ...]


class PeerFigures(NamedTuple):
    """What asking a node has shown of it, for tools. Named as in PeerStats (kvstore.proto)."""

    state: str
    fetched_bytes: int
    queued_bytes: int
    bytes_per_s: float
    latency_s: float


NO_FETCHES = FetchOrders((), ())


@dataclass(slots=True)
class _Node:
    """What is known of a peer from asking it."""

    speed: TierSpeed = field(default_factory=lambda: TierSpeed(_PRIOR))
    pause_s: float = 0.0  # after the last failure; 0: it is well
    suspect_until_s: float = 0.0
    num_open: int = 0  # fetches
    num_good: int = 0  # fetches that brought something
    fetched_bytes: int = 0


@dataclass(slots=True)
class _Flight:
    """A fetch that has not ended."""

    node_id: str
    entry: Namespace
    keys: tuple[bytes, ...]
    first: int
    rows: list[int]
    tried: frozenset[str]
    open: set[int]  # indices whose end has not been told
    unsettled: dict[int, Extent] = field(default_factory=dict)  # by index: slots in limbo of blocks that were given up
    failed: list[int] = field(default_factory=list)
    cancelled: bool = False
    brought: bool = False  # a block at least
    tried_in_vain: bool = False  # some of it failed, other than by being called off


class Borrowing:
    """The moves from other nodes' arenas to ours. Loop thread only; counts into `counters`.

    A peer that fails is suspect in the same call: nobody asks it before its pause is over, twice as long each time, and then a
    few blocks at a time until it answers well. What it did not give is asked of another holder, if somebody still waits for it.
    """

    def __init__(
        self,
        pinned: Inventory,
        directory: Locator,
        *,
        counters: dict[str, int],
        give_up: Callable[[int], None],
        is_wanted: Callable[[int], bool],
        meters: Meters,
    ) -> None:
        self._meters = meters
        self._ordered_s: dict[int, float] = {}  # of fetches that have not ended
        self._pinned = pinned
        self._index: BlockIndex = pinned.index
        self._directory = directory
        self._counters = counters
        self._give_up = give_up
        self._is_wanted = is_wanted
        self._nodes: dict[str, _Node] = {}
        self._flights: dict[int, _Flight] = {}
        self._by_row: dict[int, int] = {}  # the fetch that brings it
        self._num_fetches = 0
        self._fetches: list[Fetch] = []
        self._cancels: list[int] = []

    # --- questions ------------------------------------------------------------------------------------------------------

    def offer(self, entry: Namespace, keys: Sequence[bytes], num_held: int, now_s: float) -> Offer | None:
        """The peer to ask for blocks behind the first `num_held` of `keys`: of those that go nearly as far as the farthest,
        the one that would be done first. None: no peer that is well has more than we."""
        return self._best(entry, keys, num_held, now_s, without=())

    def suspects(self, now_s: float) -> list[str]:
        """Peers that are not asked now."""
        return sorted(node_id for node_id, node in self._nodes.items() if node.suspect_until_s > now_s)

    def figures(self, node_id: str, now_s: float) -> PeerFigures:
        """Of a node, whether it was ever asked or not."""
        node = self._nodes.get(node_id) or _Node()
        cost = node.speed.cost
        assert cost is not None, "it has a prior"
        state = "suspect" if node.suspect_until_s > now_s else "probing" if node.pause_s else "ready"
        return PeerFigures(state, node.fetched_bytes, node.speed.queued_bytes, cost.bytes_per_s, cost.latency_s)

    # --- orders ---------------------------------------------------------------------------------------------------------

    def order(  # noqa: PLR0917 - what a fetch is made of
        self, entry: Namespace, keys: Sequence[bytes], first: int, rows: Rows, offer: Offer, now_s: float
    ) -> None:
        """Fetch blocks `keys[first:]`, which are `rows` and have no copy in RAM; there is room for them. They are ARRIVING."""
        assert len(keys) - first == len(rows) > 0
        self._pinned.place(entry, rows, ARRIVING)
        self._begin(entry, tuple(keys), first, rows.tolist(), offer, frozenset(), now_s)

    def cancel(self, rows: Collection[int]) -> None:
        """Nobody waits any more for these rows. A fetch of which nothing is wanted is called off."""
        for fetch_id in {self._by_row[row] for row in rows if row in self._by_row}:
            flight = self._flights[fetch_id]
            if not any(self._is_wanted(flight.rows[i]) for i in flight.open):
                self._call_off(fetch_id, flight)

    def take_orders(self) -> FetchOrders:
        """What is to be done now."""
        orders = FetchOrders(tuple(self._fetches), tuple(self._cancels))
        self._fetches, self._cancels = [], []
        return orders

    def finish(self, done: Sequence[FetchDone], now_s: float) -> list[int]:
        """Blocks have come, or will not. Rows that nobody has to wait for any longer."""
        ended: list[int] = []
        for each in done:
            flight = self._flights[each.fetch_id]
            if each.block in flight.unsettled:
                assert each.settled
                self._settle(flight, each.block)
            else:
                self._finish_block(flight, each, now_s, ended)
                if not flight.open and flight.failed:
                    ended += self._retry(flight, now_s)
            if not flight.open and not flight.unsettled:
                self._end(each.fetch_id, flight)
        return ended

    def rows_in_flight(self) -> list[int]:
        """Rows whose slot in RAM a fetch writes; for Store.check."""
        return list(self._by_row)

    @property
    def num_in_flight(self) -> int:
        """Blocks that are on their way."""
        return len(self._by_row)

    @property
    def limbo_bytes(self) -> int:
        """Slots that a fetch which was given up may still write to."""
        return sum(extent.nbytes for flight in self._flights.values() for extent in flight.unsettled.values())

    def check(self) -> None:
        """Every block of a flight that has neither come nor been given up is on its way in RAM; flights count at their nodes."""
        held = {
            flight.rows[i]: fetch_id
            for fetch_id, flight in self._flights.items()
            for i in (*flight.open, *flight.failed)
        }
        assert held == self._by_row
        assert np.isin(self._pinned.table.state[list(held)], (ARRIVING, LEAVING)).all()
        for node_id, node in self._nodes.items():
            assert node.num_open == sum(flight.node_id == node_id for flight in self._flights.values())

    # --- ends -----------------------------------------------------------------------------------------------------------

    def _finish_block(self, flight: _Flight, done: FetchDone, now_s: float, ended: list[int]) -> None:
        node, row = self._nodes[flight.node_id], flight.rows[done.block]
        flight.open.discard(done.block)
        nbytes = flight.entry.spec.block_nbytes
        if done.problem is LoanProblem.CANCELLED:
            node.speed.cancelled(nbytes, now_s)
        else:
            node.speed.ended(nbytes, now_s, ok=done.problem is None)
        if done.problem is None:
            node.pause_s = node.suspect_until_s = 0.0
            node.fetched_bytes += nbytes
            flight.brought = True
            self._meters.transfer("peer", "read", nbytes, now_s - self._ordered_s[done.fetch_id])
            self._arrive(row)
            ended.append(row)
            return
        self._counters[f"failed_fetches_{done.problem}_total"] += 1
        flight.tried_in_vain |= done.problem is not LoanProblem.CANCELLED
        if done.problem in PEER_AT_FAULT:
            self._suspect(flight.node_id, now_s)
        if done.settled:
            flight.failed.append(done.block)  # its slot may take the same block from another holder
        else:
            flight.unsettled[done.block] = self._abandon(row)
            ended.append(row)

    def _arrive(self, row: int) -> None:
        rows, table = np.array([row], np.int64), self._pinned.table
        del self._by_row[row]
        self._pinned.slots.announce(table.slots(rows))
        self._counters["fetched_blocks_total"] += 1
        if table.state_at[row] != ARRIVING:  # dropped meanwhile
            self._pinned.unref(rows)
            return
        self._pinned.publish(rows)
        self._pinned.policy.cool([row])  # another node has it too

    def _retry(self, flight: _Flight, now_s: float) -> list[int]:
        """Ask another holder for what failed, from the first such block on; or the same one, if it was called off and is wanted
        now. Rows given up."""
        wanted = [i for i in sorted(flight.failed) if self._is_wanted(flight.rows[i])]
        tried = flight.tried | {flight.node_id} if flight.tried_in_vain else flight.tried
        offer = None
        if wanted:
            offer = self._best(flight.entry, flight.keys, flight.first + wanted[0], now_s, without=tried)
        within = offer.num_blocks - flight.first if offer else 0
        again = [i for i in wanted if i < within]
        given_up = [flight.rows[i] for i in flight.failed if i not in again]
        for row in given_up:
            self._give_up_row(row)
        flight.failed.clear()
        if offer is not None and again:
            self._counters["retried_fetches_total"] += 1
            for run in _runs(again):
                rows = [flight.rows[i] for i in run]
                last = flight.first + run[-1] + 1
                self._begin(flight.entry, flight.keys[:last], flight.first + run[0], rows, offer, tried, now_s)
        return given_up

    def _give_up_row(self, row: int) -> None:
        del self._by_row[row]
        self._give_up(row)
        self._pinned.discard(np.array([row], np.int64))

    def _abandon(self, row: int) -> Extent:
        """Give up a block whose slot may still be written to."""
        del self._by_row[row]
        extent = self._pinned.table.extent(row)
        self._give_up(row)
        self._pinned.to_limbo(np.array([row], np.int64))
        return extent

    def _settle(self, flight: _Flight, index: int) -> None:
        self._pinned.slots.free(flight.unsettled.pop(index))

    def _end(self, fetch_id: int, flight: _Flight) -> None:
        del self._flights[fetch_id], self._ordered_s[fetch_id]
        node = self._nodes[flight.node_id]
        node.num_open -= 1
        node.num_good += flight.brought

    def _call_off(self, fetch_id: int, flight: _Flight) -> None:
        if not flight.cancelled:
            flight.cancelled = True
            self._cancels.append(fetch_id)

    def _suspect(self, node_id: str, now_s: float) -> None:
        """Once for all blocks that fail together. What waits for it is called off, and asked of others."""
        node = self._nodes[node_id]
        if node.suspect_until_s > now_s:
            return
        first_s, longest_s = PEER_RETRY_S
        node.pause_s = min(2 * node.pause_s, longest_s) if node.pause_s else first_s
        node.suspect_until_s = now_s + node.pause_s
        self._counters["suspected_peers_total"] += 1
        for fetch_id, flight in self._flights.items():
            if flight.node_id == node_id:
                self._call_off(fetch_id, flight)

    # --- beginnings -----------------------------------------------------------------------------------------------------

    def _best(
        self, entry: Namespace, keys: Sequence[bytes], num_held: int, now_s: float, *, without: Collection[str]
    ) -> Offer | None:
        offers = []
        for holder in self._directory.locate(entry.namespace, keys):
            node_id = holder.node.node_id
            num_blocks = self._limit(node_id, holder.num_blocks, num_held, now_s)
            if num_blocks <= num_held or node_id in without:
                continue
            quote = self._node(node_id).speed.quote(now_s)
            if quote is not None:
                offers.append(Offer(node_id, num_blocks, quote))
        if not offers:
            return None
        farthest = max(offer.num_blocks for offer in offers) - num_held
        near = [offer for offer in offers if offer.num_blocks - num_held >= _FARTHEST_FRACTION * farthest]
        return min(near, key=lambda offer: offer.quote.load_s(farthest * entry.spec.block_nbytes))

    def _limit(self, node_id: str, num_blocks: int, num_held: int, now_s: float) -> int:
        """How far a node is believed: no farther than MAX_FETCH_BLOCKS; not at all while it is suspect; a little when its pause
        is over and nothing is under way that would tell."""
        node = self._node(node_id)
        if node.suspect_until_s > now_s or (node.pause_s and node.num_open):
            return 0
        return min(num_blocks, num_held + (_PROBE_BLOCKS if node.pause_s else MAX_FETCH_BLOCKS))

    def _begin(  # noqa: PLR0917 - what fetches are made of
        self,
        entry: Namespace,
        keys: tuple[bytes, ...],
        first: int,
        rows: list[int],
        offer: Offer,
        tried: frozenset[str],
        now_s: float,
    ) -> None:
        """In as many fetches as it takes."""
        most = max(1, _FETCH_BYTES // entry.spec.block_nbytes)
        for start in range(0, len(rows), most):
            end = min(start + most, len(rows))
            predicted_s = offer.quote.load_s(end * entry.spec.block_nbytes)
            # Of a node that was hardly asked before nobody knows how far away it is.
            known = self._node(offer.node_id).num_good >= _KNOWN_AFTER
            deadline_s = (PEER_PATIENCE_S if known else PEER_FIRST_PATIENCE_S) + 2 * predicted_s
            self._begin_one(
                entry, keys[: first + end], first + start, rows[start:end], offer.node_id, tried, deadline_s, now_s
            )

    def _begin_one(  # noqa: PLR0917 - what a fetch is made of
        self,
        entry: Namespace,
        keys: tuple[bytes, ...],
        first: int,
        rows: list[int],
        node_id: str,
        tried: frozenset[str],
        deadline_s: float,
        now_s: float,
    ) -> None:
        node, nbytes = self._node(node_id), entry.spec.block_nbytes
        node.num_open += 1
        self._num_fetches += 1
        fetch_id = self._num_fetches
        self._flights[fetch_id] = _Flight(node_id, entry, keys, first, rows, tried, set(range(len(rows))))
        self._by_row.update(dict.fromkeys(rows, fetch_id))
        self._ordered_s[fetch_id] = now_s
        for _ in rows:
            node.speed.ordered(nbytes, now_s)
        offsets = tuple(self._pinned.table.offset[rows].tolist())
        self._fetches.append(Fetch(fetch_id, node_id, entry.namespace, keys, first, offsets, nbytes, deadline_s))

    def _node(self, node_id: str) -> _Node:
        node = self._nodes.get(node_id)
        if node is None:
            if len(self._nodes) >= MAX_REMEMBERED_PEERS:
                idle = [name for name, known in self._nodes.items() if not known.num_open]
                for name in idle[: (len(idle) + 1) // 2]:
                    del self._nodes[name]
            node = self._nodes[node_id] = _Node()
        return node


def _runs(indices: Sequence[int]) -> list[list[int]]:
    """Ascending numbers, cut where one is missing."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
