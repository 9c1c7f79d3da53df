"""The store's decisions: who gets which slot, which blocks are found, what goes when there is no room."""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.borrowing import NO_FETCHES, Borrowing, FetchOrders, Locator, Offer, PeerFigures
from kvstore.core.blocks import NO_SLOTS, Holder, KeyStatus, SlotArrays
from kvstore.core.errors import LeaseExpired, LeaseRefused, Overloaded, ProtocolError, SpecMismatch, UnknownLease
from kvstore.core.events import BlockRemoved, BlockStored, Event, RemovalReason
from kvstore.core.keys import KVSpec, differing_fields
from kvstore.core.limits import (
    MAX_KEYS_PER_CALL,
    MAX_LEASES_PER_INSTANCE,
    MAX_LIMBO_FRACTION,
    MAX_NAMESPACES,
    MAX_PIN_S,
    MAX_PINNED_FRACTION,
)
from kvstore.core.loans import FetchDone
from kvstore.core.moves import Forget, MoveDone, Touch, Urgency
from kvstore.core.plans import NOWHERE, TIERS, Match, NamespaceInfo, NearMiss, Prefetch, ReadGrant, WriteGrant
from kvstore.core.ports import DriveSlots, SlotSpace
from kvstore.costs import LoadCost, TierQuote
from kvstore.counters import new_counters
from kvstore.eviction import LeafLru, MakePolicy
from kvstore.eviction.redundant import RedundantFirst
from kvstore.index import KEPT, NO_PARENT, NO_ROWS, BlockIndex, Namespace, Rows
from kvstore.inspection import Inspector
from kvstore.inventory import Inventory
from kvstore.labels import Labels
from kvstore.leases import Lease, LeaseKind, LeaseTable, expiry_s, fingerprint
from kvstore.meters import Meters
from kvstore.pins import Pins
from kvstore.placements import ARRIVING, LEAVING, NONE, READY, WRITING
from kvstore.presence import HBM, PoolReport, Presence
from kvstore.removed_keys import DAMAGED, DECLINED, DROPPED, EVICTED, RemovedKeys
from kvstore.slab import Slab
from kvstore.spill import BudgetFigures, Orders, QueueDepth, RestoredBlocks, Spill, SpillPolicy
from kvstore.store_stats import Removals, StoreStats, policy_name, pool_stats, tier_stats
from kvstore.tiers.striped import StripedSlots

MAX_NEAR_MISSES = 8
"""Near misses told at Hello, those with most blocks first. More help nobody find the field that differs."""

_PEER = TIERS.index("peer")
_PROBE_BYTES = 2 << 20  # read to learn how fast a drive is now

_HELD = (WRITING, READY, ARRIVING)
_STATUS = {int(status): status for status in KeyStatus}  # KeyStatus(number) takes ten times as long
_REMOVALS = {RemovalReason.EVICTED: EVICTED, RemovalReason.DROPPED: DROPPED, RemovalReason.DAMAGED: DAMAGED}
_MAX_COMPARED = 64  # candidates for them whose fields are compared, some 4 us each


class Store:
    """Index, leases and eviction behind the verbs of the protocol. Plain synchronous code; one thread, the loop's, calls.

    `now_s` is on one monotonic clock and never goes back. A call that raises has changed nothing, except that leases
    past their time have expired, and that release and abort of an expired lease confirm its end. Keys of a call are those
    of one sequence, in order; the same key twice raises ProtocolError.
    """

    def __init__(
        self,
        *,
        pinned: SlotSpace,
        nvme: DriveSlots | None = None,
        spill: SpillPolicy | None = None,
        on_event: Callable[[Event], None] | None = None,
        limbo_fraction: float = MAX_LIMBO_FRACTION,
        max_leases_per_instance: int = MAX_LEASES_PER_INSTANCE,
        make_policy: MakePolicy = LeafLru,
        first_sequence: int = 0,
        directory: Locator | None = None,
        slab: SlotSpace | None = None,
    ) -> None:
        """`directory` says what other nodes hold; None: there are none. `slab`: of device memory that engines share."""
        self._index = BlockIndex(first_sequence=first_sequence)
        self.meters = Meters()
        self._removed = RemovedKeys()
        self._on_event = on_event
        self._counters = new_counters()
        self.presence = Presence(on_event, self._counters)
        spare_first = partial(RedundantFirst, make_policy=make_policy, is_redundant=self._is_redundant)
        self._blocks = Inventory(TIERS[0], self._index, pinned, spare_first, self._heard)
        self._spill = Spill(
            self._blocks,
            StripedSlots(()) if nvme is None else nvme,
            spill or SpillPolicy(),
            counters=self._counters,
            give_up=self._give_up,
            is_wanted=self._is_wanted,
            on_event=self._heard,
            meters=self.meters,
            make_policy=make_policy,
        )
        self._has_drives = nvme is not None
        self._borrowing: Borrowing | None = None
        if directory is not None:
            self._borrowing = Borrowing(
                self._blocks,
                directory,
                counters=self._counters,
                give_up=self._give_up,
                is_wanted=self._is_wanted,
                meters=self.meters,
            )
        self._slab = None if slab is None else Slab(self._index, self._blocks.table, slab, self._counters)
        self._pins = Pins(self._index)
        self._labels = Labels(self._index)
        self._limbo_fraction = limbo_fraction
        self._leases = LeaseTable(max_leases_per_instance=max_leases_per_instance)
        self._waiting: dict[int, list[Lease]] = {}  # by row that is arriving: leases that were granted it
        self._drops: dict[bytes, set[bytes] | None] = {}  # by namespace, while the drives are being restored; None: all

    # --- namespaces -------------------------------------------------------------------------------------------------

    def open_namespace(
        self, spec: KVSpec, tenant: str, in_use: Callable[[], Collection[bytes]] | None = None
    ) -> NamespaceInfo:
        """Make the spec's namespace known and tell what it holds.

        When there are MAX_NAMESPACES already, those are closed that know no block and are not `in_use`, which is asked only
        then (None: all are). Raises Overloaded when that makes no room, SpecMismatch when a block does not fit a segment.
        """
        namespace = spec.namespace(tenant)
        entry = self._index.find_namespace(namespace)
        if entry is None:
            slot_nbytes = self._blocks.slots.slot_nbytes(spec.block_nbytes)
            if self._index.num_namespaces >= MAX_NAMESPACES and in_use is not None:
                self._index.close_unused(in_use())
            if self._index.num_namespaces >= MAX_NAMESPACES:
                raise Overloaded(
                    f"{MAX_NAMESPACES} namespaces hold blocks or are open in a session (MAX_NAMESPACES)",
                    limit="MAX_NAMESPACES",
                    value=MAX_NAMESPACES,
                )
            entry = self._index.open_namespace(namespace, spec, tenant, slot_nbytes)
            self._spill.grow()
        return NamespaceInfo(namespace, spec.block_nbytes, self._num_ready(entry), self._near_misses(entry))

    def spec(self, namespace: bytes) -> KVSpec:
        """What the namespace's blocks are. Raises SpecMismatch when it is not open."""
        return self._namespace(namespace).spec

    def digest_nbytes(self, namespace: bytes) -> int:
        """Length of the namespace's keys. Raises SpecMismatch when it is not open."""
        return self._namespace(namespace).spec.hash.digest_nbytes

    def lease_digest_nbytes(self, holder: Holder, lease_id: int) -> int:
        """Length of the keys of a live lease. Raises LeaseExpired, UnknownLease."""
        lease = self._leases.find_live(holder, lease_id)
        return self._index.namespace_of(int(lease.rows[lease.pending][0])).spec.hash.digest_nbytes

    # --- reading ----------------------------------------------------------------------------------------------------

    def match(self, namespace: bytes, keys: Sequence[bytes], now_s: float) -> Match:
        """The longest prefix that can be read. Changes nothing but recency (I5); to read the blocks, acquire them."""
        _check_count(keys)
        entry = self._namespace(namespace)
        rows, ready = self._readable_prefix(entry, keys)
        self._use(rows, now_s)
        tiers = (~ready).tobytes()  # TIERS: pinned is 0, nvme 1
        offer = self._offer_behind(entry, keys, len(rows), now_s)
        if offer is not None:
            tiers += bytes([_PEER]) * (offer.num_blocks - len(rows))
        self._counters["hit_blocks_total"] += len(tiers)
        self._counters["miss_blocks_total"] += len(keys) - len(tiers)
        return Match(len(tiers), tiers)

    def match_each(self, namespace: bytes, keys: Sequence[bytes]) -> Match:
        """For every key the tier that has it here, NOWHERE where none has; changes nothing. For layers that need only some of a
        sequence's blocks. What other nodes have is not told: they are asked for runs."""
        _check_count(keys)
        rows = self._index.find_all(self._namespace(namespace), keys)
        state = self._blocks.table.state[rows]
        here = (state == READY) | (state == ARRIVING) | ((state == NONE) & self._spill.readable(rows))
        tiers = np.where(here & (rows != NO_PARENT), (state != READY).astype(np.uint8), NOWHERE)
        missing = np.flatnonzero(tiers == NOWHERE)
        return Match(int(missing[0]) if len(missing) else len(keys), tiers.tobytes())

    def why_missing(self, namespace: bytes, keys: Sequence[bytes]) -> dict[str, int]:
        """Why `keys`, those of a sequence behind what Match found, cannot be read: how many for which reason of usage.MISSES."""
        entry = self._namespace(namespace)
        rows = self._index.find_all(entry, keys)
        known = rows != NO_PARENT
        if not known.any():
            return self._removed.count(namespace, keys)
        pinned, nvme = self._blocks.table.state[rows], self._spill.nvme.table.state[rows]
        writing = known & (pinned == WRITING)
        held = known & ~writing & ((pinned == READY) | (pinned == ARRIVING) | self._spill.readable(rows))
        unreadable = known & ~writing & ~held & (nvme == READY)
        gone = np.flatnonzero(~(writing | held | unreadable)).tolist()
        counts = {"being_written": writing, "behind_gap": held, "unreadable": unreadable}
        reasons = {reason: found for reason, rows in counts.items() if (found := int(np.count_nonzero(rows)))}
        return {**reasons, **self._removed.count(namespace, [keys[i] for i in gone])}

    def absences(self, key: bytes) -> list[tuple[bytes, str]]:
        """Namespaces in which the block was once, and the reason why it is not now, as far as is remembered."""
        return [
            (entry.namespace, reason)
            for entry in self._index.namespaces
            if entry.spec.hash.digest_nbytes == len(key) and not self.holds(entry.namespace, key)
            for reason in self._removed.count(entry.namespace, [key])
            if reason != "never_stored"
        ]

    def prefetch(self, namespace: bytes, keys: Sequence[bytes], first_needed: int, now_s: float) -> Prefetch:
        """Bring the readable prefix from block `first_needed` on to RAM, as far as there is room. Owns nothing."""
        self.expire(now_s)
        _check_count(keys)
        entry = self._namespace(namespace)
        rows, _ = self._readable_prefix(entry, keys)
        self._index.touch(rows)
        needed = rows[max(first_needed, 0) :]
        _check_distinct(len(set(needed.tolist())), len(needed))
        absent = int(np.count_nonzero(self._blocks.table.state[needed] == NONE))
        self._bring(entry, needed, Urgency.PREFETCH)
        still = int(np.count_nonzero(self._blocks.table.state[needed] == NONE))
        borrowed = self._borrow(entry, keys, max(len(rows), first_needed), needed, now_s) if not still else NO_ROWS
        return Prefetch(len(rows) + len(borrowed), absent - still + len(borrowed))

    def acquire(  # noqa: PLR0917 - the protocol's fields, in its order
        self,
        holder: Holder,
        request_id: str,
        namespace: bytes,
        keys: Sequence[bytes],
        first_needed: int,
        ttl_s: float,
        now_s: float,
        *,
        from_back: bool = False,
        borrow: bool = True,
        slab: bool = False,
    ) -> ReadGrant:
        """Lease the readable prefix from block `first_needed` on. Nothing to lease: lease 0, which needs no release.

        Blocks that lie on a drive only are ordered from there, once, however many ask, the last ones first if `from_back`:
        their slots are granted, and their bytes come later, or not (ReadGrant.ready). Where the arena has no room for them,
        the run ends. Behind them come blocks that another node has, unless the caller is one (not `borrow`): its lease ends
        by itself. `slab`: the caller has the slab mapped (ReadGrant.slab).

        The same request again (same id, same arguments) renews and answers with the live lease it got. Raises
        ProtocolError when the id was used for another request, LeaseRefused when the instance may not have a lease now.
        """
        self.expire(now_s)
        entry = self._namespace(namespace)
        request = fingerprint(namespace, keys, first_needed.to_bytes(8, "little", signed=True))
        lease = self._find_request(holder, LeaseKind.READ, request_id, request)
        if lease is None:
            _check_count(keys)
            rows, _ = self._readable_prefix(entry, keys)
            needed = rows[max(first_needed, 0) :]
            _check_distinct(len(set(needed.tolist())), len(needed))
            start = max(len(rows), first_needed)
            if len(needed) or (borrow and self._offer_behind(entry, keys, start, now_s)):
                self._check_allowed(holder.instance)
            self._use(rows, now_s)
            num_before, num_wanted = len(rows) - len(needed), len(needed)
            needed = self._bring(entry, needed, Urgency.READ, from_back=from_back)
            if borrow and len(needed) == num_wanted:
                borrowed = self._borrow(entry, keys, start, needed, now_s)
                num_before = start if len(borrowed) and not num_wanted else num_before
                needed = np.concatenate((needed, borrowed))
            if not len(needed):
                return ReadGrant(0, now_s, num_before, NO_SLOTS, entry.spec.block_nbytes, b"")
            self._blocks.ref(needed)
            self._index.hits[needed] += 1
            self._spill.on_read(needed)
            lease = self._grant(holder, LeaseKind.READ, request_id, request, entry, needed, expiry_s(ttl_s, now_s))
            lease.first_needed, lease.lent = num_before, not borrow
            self._counters["acquired_blocks_total"] += len(needed)
            arriving = needed[self._blocks.table.state[needed] == ARRIVING]
            self._spill.hasten(arriving)
            for row in arriving.tolist():
                self._waiting.setdefault(row, []).append(lease)
        else:
            self._leases.renew(lease, expiry_s(ttl_s, now_s))
        num_blocks = lease.first_needed + len(lease.rows)
        ready = self._ready(lease)
        grant = ReadGrant(lease.lease_id, lease.expires_s, num_blocks, lease.slots, entry.spec.block_nbytes, ready)
        if self._slab is None or not slab:
            return grant
        return grant._replace(slab=self._slab.grant(lease.lease_id, entry, lease.rows))

    def quotes(
        self, namespace: bytes, keys: Sequence[bytes], match: Match, now_s: float
    ) -> dict[int, TierQuote | None]:
        """What each slower tier of a match would need now, by its number in TIERS; None: it does not answer."""
        quotes: dict[int, TierQuote | None] = {}
        if self._has_drives:
            quotes[1] = self._spill.quote(now_s)
        if (num_here := match.tiers.find(_PEER)) >= 0:
            offer = self._offer_behind(self._namespace(namespace), keys, num_here, now_s)
            quotes[_PEER] = None if offer is None else offer.quote
        return quotes

    def probe(self, namespace: bytes, keys: Sequence[bytes], first: int, now_s: float) -> None:
        """Blocks from `first` on were not worth fetching. If that rests on an old figure, try the drives on a few of them:
        a tier that nobody uses could not recover otherwise."""
        speed = self._spill.speed
        if self._has_drives and speed.wants_probe(now_s):
            speed.probing(now_s)
            count = -(-_PROBE_BYTES // self._namespace(namespace).spec.block_nbytes)
            self.prefetch(namespace, keys[: first + count], first, now_s)

    def set_tier_speed(self, latency_s: float, bytes_per_s: float) -> None:
        """What the drives were measured to do at the start; until there are reads to go by."""
        self._spill.speed.set_prior(LoadCost(latency_s, bytes_per_s))

    # --- writing ----------------------------------------------------------------------------------------------------

    def reserve(  # noqa: PLR0917 - likewise
        self,
        holder: Holder,
        request_id: str,
        namespace: bytes,
        parent: bytes,
        keys: Sequence[bytes],
        ttl_s: float,
        now_s: float,
        *,
        keep_s: float = 0.0,
    ) -> WriteGrant:
        """Slots for those of `keys` that nobody has stored or is storing: the longest run from the first key on (I6).

        `parent` is the key before keys[0], b"" when there is none. Makes room by eviction, never of `parent` or `keys`. Declined,
        with all keys after it, is a key without room (no_space), one whose parent is not held (orphan), and one
        whose dropped copy somebody still uses (leaving): that copy's lease ends soon, and until then the block has no
        second place (I2). Blocks that nobody had before live for `keep_s` from now on and no longer, 0: without end.
        Idempotent and raises like acquire; a full tier is a value.
        """
        self.expire(now_s)
        entry = self._namespace(namespace)
        request = fingerprint(namespace, keys, parent)
        lease = self._find_request(holder, LeaseKind.WRITE, request_id, request)
        if lease is not None:
            self._leases.renew(lease, expiry_s(ttl_s, now_s))
            return _write_grant(lease, entry)
        _check_keys(keys)
        rows, parent_row = self._find(entry, keys, parent)
        end, reason = self._first_declined(rows, parent, parent_row)
        wanted = self._not_held(rows[:end])
        if len(wanted):
            self._check_allowed(holder.instance)
            if self._make_room(entry, len(wanted), rows[:end], parent_row):
                rows, parent_row = self._find(entry, keys, parent)
            num_free = self._blocks.slots.num_free(entry.slot_nbytes)
            if num_free < len(wanted):
                end, reason = int(wanted[num_free]), "no_space"
                wanted = wanted[:num_free]
            rows = self._add_unknown(entry, keys[:end], rows[:end], parent_row)
            self._blocks.place(entry, rows[wanted])
            if keep_s:
                fresh = rows[wanted]
                self._pins.set_expiry(fresh[self._spill.nvme.table.state[fresh] == NONE], now_s + keep_s)
        self._use(rows[:end] if parent_row == NO_PARENT else np.append(parent_row, rows[:end]), now_s)
        statuses = np.full(len(keys), KeyStatus.DECLINED, np.uint8)
        statuses[:end] = KeyStatus.HELD
        statuses[wanted] = KeyStatus.GRANTED
        self._count_reserve(len(wanted), end, len(keys), reason)
        self._removed.add(namespace, keys[end:], DECLINED)
        if not len(wanted):
            return WriteGrant(0, now_s, _statuses(statuses.tobytes()), NO_SLOTS, entry.spec.block_nbytes, reason)
        lease = self._grant(holder, LeaseKind.WRITE, request_id, request, entry, rows[wanted], expiry_s(ttl_s, now_s))
        lease.keys = [keys[i] for i in wanted.tolist()]
        lease.statuses, lease.declined_reason = statuses.tobytes(), reason
        return _write_grant(lease, entry)

    def commit(self, holder: Holder, lease_id: int, keys: Sequence[bytes] | None, now_s: float) -> int:
        """Publish blocks of a write lease, all that it still holds or `keys`, and say how many became READY.

        Not counted: blocks committed before, and blocks dropped meanwhile, whose slots are freed. The lease ends with its last
        block. Raises LeaseExpired (nothing is published; abort confirms the end) and UnknownLease.
        """
        self.expire(now_s)
        lease = self._leases.find_live(holder, lease_id)
        if lease.kind is not LeaseKind.WRITE:
            raise ProtocolError(
                f"lease_id: {lease_id} is a read lease; there is nothing to commit", field="lease_id", value=lease_id
            )
        chosen = lease.pending if keys is None else lease.pending & _of_lease(lease, keys)
        rows = lease.rows[chosen]
        state = self._blocks.table.state[rows]
        written, dropped = rows[state == WRITING], rows[state == LEAVING]
        lease.pending = lease.pending & ~chosen
        self._blocks.publish(written)
        self._blocks.discard(dropped)
        self._spill.on_stored(written)
        self._counters["stored_blocks_total"] += len(written)
        if len(written):
            nbytes = len(written) * self._index.namespace_of(int(written[0])).spec.block_nbytes
            self.meters.transfer(TIERS[0], "write", nbytes, None)
        if not lease.pending.any():
            self._leases.end(lease)
        return len(written)

    # --- wishes -----------------------------------------------------------------------------------------------------

    def pin(self, namespace: bytes, keys: Sequence[bytes], pin_s: float, now_s: float) -> int:
        """Keep the readable prefix of `keys` from eviction for `pin_s` from now on (at most MAX_PIN_S), 0: no longer; how
        many blocks. Of all pins together no more than MAX_PINNED_FRACTION of the arena is kept: the rest of the prefix is not."""
        self.expire(now_s)
        _check_count(keys)
        entry = self._namespace(namespace)
        rows, _ = self._readable_prefix(entry, keys)
        if pin_s <= 0:
            self._let_go(rows)
            return len(rows)
        new = self._index.marks[rows] & KEPT == 0
        left = int(MAX_PINNED_FRACTION * self._blocks.slots.capacity_bytes) - self._pins.kept_bytes()
        within = np.cumsum(new) * entry.slot_nbytes <= left
        rows = rows[within | ~new]
        self._pins.keep(rows, now_s + min(pin_s, MAX_PIN_S))
        self._counters["pinned_blocks_total"] += len(rows)
        return len(rows)

    def cool(self, namespace: bytes, keys: Sequence[bytes], now_s: float) -> int:
        """Nobody is going to need the readable prefix of `keys` soon: its pin ends, and it goes before anything else, tail
        first, unless it is used again before. Blocks that other prefixes share stay as they are. How many blocks it has."""
        self.expire(now_s)
        _check_count(keys)
        rows, _ = self._readable_prefix(self._namespace(namespace), keys)
        self._let_go(rows)
        tail_first = rows[::-1].tolist()
        for tier in self._tiers():
            tier.policy.cool(tail_first)
        return len(rows)

    def report_pool(self, holder: Holder, namespace: bytes, report: PoolReport) -> None:
        """An engine tells what changed in its own pool (HBM)."""
        entry = self._namespace(namespace)
        self.presence.report(holder, namespace, report, entry.spec.block_nbytes)
        for run in report.stored:
            self._offer_redundant(entry, run.keys)

    # --- ends of leases ---------------------------------------------------------------------------------------------

    def abort(self, holder: Holder, lease_id: int, now_s: float) -> None:
        """End a lease: its holder will not touch its slots again. What was not committed is gone, its slots are free.

        Raises LeaseExpired when the lease had expired, but the confirmation counts: what it kept in limbo is free now.
        """
        self.expire(now_s)
        lease = self._leases.find(holder, lease_id)
        expired = lease.expired
        self._end(lease)
        if expired:
            raise LeaseExpired(f"lease_id: {lease_id} had expired; its end is confirmed now", lease_id=lease_id)

    def num_awaited(self, lease_id: int) -> int:
        """Blocks of a lease that have not come yet."""
        lease = self._leases.find_any(lease_id) if self._waiting else None
        return 0 if lease is None else sum(row in self._waiting for row in lease.rows[lease.pending].tolist())

    def release(self, holder: Holder, lease_id: int, now_s: float, *, filled: bytes = b"") -> None:
        """The same as abort: readers say release, writers say abort, both mean it alike. `filled`: Slab.filled."""
        self.expire(now_s)
        if self._slab is not None and filled and not self._leases.find(holder, lease_id).expired:
            self._slab.filled(lease_id, filled)
        self.abort(holder, lease_id, now_s)

    def renew(
        self, holder: Holder, lease_ids: Sequence[int], ttl_s: float, now_s: float, *, others_ended: bool = False
    ) -> list[int]:
        """Extend live leases. Returns the ids of those that have ended, expired or are unknown.

        `others_ended` confirms the end of all expired leases of the instance that are not named.
        """
        self.expire(now_s)
        if others_ended:
            self._end_expired(holder.instance, kept=set(lease_ids))
        ended = []
        for lease_id in lease_ids:
            try:
                self._leases.renew(self._leases.find_live(holder, lease_id), expiry_s(ttl_s, now_s))
            except (LeaseExpired, UnknownLease):
                ended.append(lease_id)
        return ended

    def end_session(self, holder: Holder, now_s: float) -> None:
        """The connection ended: what was granted over it expires now."""
        self.expire(now_s)
        self.presence.end_session(holder)
        for lease in self._leases.of_instance(holder.instance):
            if lease.holder == holder and not lease.expired:
                self._expire(lease)

    def end_instance(self, instance: bytes, now_s: float) -> None:
        """No process of the instance can touch memory any more: all its leases end, confirmed."""
        self.expire(now_s)
        for lease in self._leases.of_instance(instance):
            self._end(lease)

    def expire(self, now_s: float) -> int:
        """Take the rights of leases past their time; how many. End the pins, and the blocks, whose time is over."""
        due = self._leases.pop_due(now_s)
        for lease in due:
            self._expire(lease)
        if (next_s := self._pins.next_due_s()) is not None and next_s <= now_s:
            self._offer(np.array(self._pins.take_due_pins(now_s), np.int64))
            self._drop_outlived(np.array(self._pins.take_due_blocks(now_s), np.int64))
        return len(due)

    def next_expiry_s(self) -> float | None:
        """When `expire` will next have something to do."""
        times = (self._leases.next_expiry_s(), self._pins.next_due_s())
        return min((time_s for time_s in times if time_s is not None), default=None)

    def instance_in_limbo(self, instance: bytes) -> bool:
        """Whether expired leases of the instance wait for a confirmation."""
        return any(lease.expired for lease in self._leases.of_instance(instance))

    # --- removal ----------------------------------------------------------------------------------------------------

    def drop(self, namespace: bytes, keys: Sequence[bytes] | None) -> int:
        """Remove blocks and everything built on them (None: the whole namespace); how many are no longer found or written.

        Descendants go too: behind a missing prefix nobody can find them, and whatever made the prefix wrong went into them.
        A block in use is LEAVING: not found, not leased again, its slot free when its last user ends. A block being
        written is not published by its commit. Unknown keys are ignored.
        """
        entry = self._namespace(namespace)
        if keys is None:
            rows = self._index.rows_of(entry)
        else:
            found = self._index.find_all(entry, keys)
            rows = self._index.with_descendants(np.unique(found[found != NO_PARENT]))
        if self._has_drives and not self._spill.active:
            self._drops[namespace] = self._with_drop(self._drops.get(namespace, set()), keys)
        num_dropped = self._drop(entry, rows)
        self._counters["dropped_blocks_total"] += num_dropped
        return num_dropped

    # --- drives -----------------------------------------------------------------------------------------------------

    def restore(self, spec: KVSpec, tenant: str, blocks: RestoredBlocks) -> None:
        """Blocks of one namespace that the drives have from before a restart, a part at a time. They can be found when
        `start_spilling` was called."""
        self.open_namespace(spec, tenant)
        self._spill.restore(self._namespace(spec.namespace(tenant)), blocks)

    def restore_quarantined(self, offset: int, nbytes: int) -> None:
        """A slot on a drive that is not to be used. Before `start_spilling`."""
        self._spill.restore_quarantined(offset, nbytes)

    def start_spilling(self, written: Mapping[int, int], wall_offset_s: float) -> None:
        """All is restored, and the drives' segments are added. `written`: bytes by hour since the epoch, as far back as a day;
        `now_s + wall_offset_s` is the time since the epoch. Drops since the start apply to what was restored too."""
        self._spill.start(written, wall_offset_s)
        drops, self._drops = self._drops, {}
        for namespace, keys in drops.items():
            if self._index.find_namespace(namespace) is not None:  # closed meanwhile: the drives had nothing of it
                self.drop(namespace, None if keys is None else list(keys))

    def take_orders(self, now_s: float) -> Orders:
        """What is to be done on the drives now. To be asked after every verb, `finish_...` and `tick`."""
        return self._spill.take_orders(now_s)

    def finish_moves(self, done: Sequence[MoveDone], now_s: float) -> None:
        """Moves have ended. Readers see it in the generation table."""
        for move in done:
            row = self._spill.finish_move(move, now_s)
            self._waiting.pop(row, None)

    def finish_forgets(self, forgets: Sequence[Forget]) -> None:
        """Removals are durable."""
        self._spill.finish_forgets(forgets)

    def tick(self, now_s: float) -> None:
        """Twice a second or so."""
        self._spill.tick(now_s)

    def take_touches(self) -> list[Touch]:
        """Recency that changed since this was last asked, for the drives to keep."""
        return self._spill.take_touches()

    # --- peers --------------------------------------------------------------------------------------------------------

    def take_fetches(self) -> FetchOrders:
        """What is to be fetched from other nodes now. To be asked after every verb and every `finish_fetches`."""
        return NO_FETCHES if self._borrowing is None else self._borrowing.take_orders()

    def finish_fetches(self, done: Sequence[FetchDone], now_s: float) -> None:
        """Blocks have come from other nodes, or will not. Readers see it in the generation table."""
        assert self._borrowing is not None
        for row in self._borrowing.finish(done, now_s):
            self._waiting.pop(row, None)

    def holds(self, namespace: bytes, key: bytes) -> bool:
        """Whether the block can be found here, in whatever tier."""
        entry = self._index.find_namespace(namespace)
        row = NO_PARENT if entry is None else entry.rows.get(key, NO_PARENT)
        return row != NO_PARENT and READY in {self._blocks.table.state_at[row], self._spill.nvme.table.state_at[row]}

    def num_held(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """How much of the prefix can be read here, without a trace."""
        return len(self._readable_prefix(self._namespace(namespace), keys)[0])

    def held_blocks(self) -> list[tuple[bytes, list[bytes]]]:
        """Keys that may be held, by namespace; ask `holds` of each."""
        return [(entry.namespace, list(entry.rows)) for entry in self._index.namespaces if entry.rows]

    @property
    def num_rows(self) -> int:
        """For `held_events`."""
        return self._index.num_rows

    def held_events(self, first_row: int, num_rows: int) -> list[BlockStored]:
        """What can be found of these rows in each tier: a slice of everything, for those who hear of events late."""
        tiers = (self._blocks, self._spill.nvme)
        return [event for tier in tiers for event in tier.held_events(first_row, num_rows)]

    def suspects(self, now_s: float) -> list[str]:
        """Nodes that failed and are left alone now."""
        return [] if self._borrowing is None else self._borrowing.suspects(now_s)

    def num_leases_of(self, instance: bytes) -> int:
        """Leases of an engine or node, those in limbo among them."""
        return len(self._leases.of_instance(instance))

    def peer_figures(self, node_id: str, now_s: float) -> PeerFigures:
        """How another node does; of a store that has peers."""
        assert self._borrowing is not None
        return self._borrowing.figures(node_id, now_s)

    # --- looking ----------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Sizes and counters now."""
        pinned, nvme = self._blocks.table, self._spill.nvme.table
        tiers = [tier_stats(self._blocks, 0)]
        if self._has_drives:
            tiers.append(tier_stats(self._spill.nvme, self._spill.quarantined_bytes))
        if self._slab is not None:
            tiers.append(tier_stats(self._slab.blocks, 0))
        if not self.presence.is_empty:
            tiers.append(pool_stats(self.presence.sizes()))
        return StoreStats(
            tuple(tiers),
            pinned.num_blocks(READY) + nvme.num_blocks(READY) - pinned.num_shared,
            self._index.num_namespaces,
            self._leases.num_live,
            self._leases.num_expired,
            dict(self._counters),
        )

    def inspector(self) -> Inspector:
        """To look at single blocks."""
        return Inspector(self._index, tuple(tier.table for tier in self._tiers()), self._leases, self._labels)

    def label(self, namespace: bytes, keys: Sequence[bytes], text: str) -> None:
        """A prompt of these blocks is called so; those that are not known stay so."""
        rows = self._index.find_all(self._namespace(namespace), keys)
        self._labels.give(rows[rows >= 0], text)

    def removals(self) -> list[Removals]:
        """What left which tier, why, and by whose choice."""
        return [
            Removals(
                tier.table.tier,
                policy_name(tier.policy) if reason is RemovalReason.EVICTED else "",
                reason.value,
                *tier.removed[reason],
            )
            for tier in self._tiers()
            for reason in RemovalReason
        ]

    def queues(self) -> list[QueueDepth]:
        """What waits, and how much may."""
        depths = self._spill.queues() if self._has_drives else []
        if self._borrowing is not None:
            depths.append(QueueDepth("peer_fetches", self._borrowing.num_in_flight, 0))
        return depths

    def write_budget(self, now_s: float) -> BudgetFigures | None:
        """Of the drives, where there are any."""
        return self._spill.budget(now_s) if self._has_drives else None

    def held_by_tenant(self) -> dict[str, dict[str, int]]:
        """READY bytes, by slot, in each tier."""
        held: dict[str, dict[str, int]] = {}
        for tier in self._tiers():
            for entry in self._index.namespaces:
                if num_blocks := tier.num_ready(entry):
                    of_tenant = held.setdefault(entry.tenant, {})
                    name = tier.table.tier
                    of_tenant[name] = of_tenant.get(name, 0) + num_blocks * entry.slot_nbytes
        for size in self.presence.sizes():
            of_tenant = held.setdefault(self._namespace(size.namespace).tenant, {})
            of_tenant[HBM] = of_tenant.get(HBM, 0) + size.num_held * size.block_nbytes
        return held

    def check(self) -> None:
        """Every invariant of every part, and those that no part sees alone. O(everything); for tests and `kvstore check`."""
        self._index.check()
        self._blocks.check()
        borrowed: list[int] = []
        if self._borrowing is not None:
            self._borrowing.check()
            borrowed = self._borrowing.rows_in_flight()
        self._spill.check(borrowed)
        self._leases.check()
        self._pins.check()
        self._labels.check()
        self.presence.check()
        if self._slab is not None:
            self._slab.check()
        table = self._blocks.table
        refs = np.zeros(len(table.refs), np.int64)
        np.add.at(refs, [*self._spill.rows_in_flight(), *borrowed], 1)
        limbo_bytes = 0 if self._borrowing is None else self._borrowing.limbo_bytes
        for lease in self._leases.all_leases():
            if lease.kind is LeaseKind.WRITE and lease.expired:
                limbo_bytes += lease.held_bytes
                continue
            held = lease.rows[lease.pending]
            refs[held] += 1
            allowed = (WRITING, LEAVING) if lease.kind is LeaseKind.WRITE else (READY, LEAVING, ARRIVING)
            assert np.isin(table.state[held], allowed).all()  # I1, I4
            assert (table.offset[held] == lease.slots.offsets[lease.pending]).all()  # I4
            assert (table.generation[held] == lease.slots.generations[lease.pending]).all()  # I7
        assert (refs == table.refs).all()
        assert limbo_bytes == self._blocks.slots.limbo_bytes

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _heard(self, event: Event) -> None:
        """An event of a tier: why a block went is remembered, and others hear of it."""
        if isinstance(event, BlockRemoved):
            self._removed.add(event.namespace, event.hashes, _REMOVALS[event.reason])
            if self._slab is not None and event.tier == TIERS[0]:
                self._slab.forget(self._namespace(event.namespace), event.hashes)
        elif event.tier == TIERS[1]:
            self._offer_redundant(self._namespace(event.namespace), event.hashes)
        if self._on_event is not None:
            self._on_event(event)

    def _namespace(self, namespace: bytes) -> Namespace:
        entry = self._index.find_namespace(namespace)
        if entry is None:
            raise SpecMismatch(
                f"namespace: {namespace.hex()} is not open; say Hello with its spec",
                field="namespace",
                value=namespace.hex(),
            )
        return entry

    def _near_misses(self, entry: Namespace) -> tuple[NearMiss, ...]:
        """Those with most blocks; among as many, those that differ in fewest fields. Bounded, since the loop waits for it."""
        candidates = heapq.nsmallest(
            _MAX_COMPARED, self._index.alike(entry), key=lambda other: -self._blocks.num_ready(other)
        )
        misses = [
            NearMiss(other.namespace, tuple(differing_fields(entry.spec, other.spec)), self._blocks.num_ready(other))
            for other in candidates
        ]
        misses.sort(key=lambda miss: (-miss.num_blocks, len(miss.differing_fields), miss.namespace))
        return tuple(misses[:MAX_NEAR_MISSES])

    def _num_ready(self, entry: Namespace) -> int:
        return max(self._blocks.num_ready(entry), self._spill.nvme.num_ready(entry))

    def _use(self, rows: Rows, now_s: float) -> None:
        """A request uses these: for the policies once, whatever verbs it comes with."""
        fresh = self._index.use(rows, now_s)
        if len(fresh):
            for tier in self._tiers():
                tier.policy.used(fresh)

    def _readable_prefix(self, entry: Namespace, keys: Sequence[bytes]) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of the longest prefix that can be read (I1), and which of them are READY in RAM. What an engine writes is not
        read from a drive meanwhile (I2); what arrives from there, is."""
        rows = self._index.find_prefix(entry, keys)
        state = self._blocks.table.state[rows]
        ready = state == READY
        if not ready.all():
            found = ready | (state == ARRIVING) | ((state == NONE) & self._spill.readable(rows))
            if not found.all():
                end = int(found.argmin())
                return rows[:end], ready[:end]
        return rows, ready

    def _bring(self, entry: Namespace, needed: Rows, urgency: Urgency, *, from_back: bool = False) -> Rows:
        """Order from the drives those of a readable run that have no copy in RAM; the part of the run that there is room for."""
        absent = np.flatnonzero(self._blocks.table.state[needed] == NONE)
        if not len(absent):
            return needed
        self._make_room(entry, len(absent), needed, NO_PARENT)
        num_free = self._blocks.slots.num_free(entry.slot_nbytes)
        if num_free < len(absent):
            needed = needed[: int(absent[num_free])]
            absent = absent[:num_free]
        self._spill.order_reads(entry, needed[absent], urgency, from_back=from_back)
        return needed

    def _offer_behind(self, entry: Namespace, keys: Sequence[bytes], num_here: int, now_s: float) -> Offer | None:
        """What another node has behind the first `num_here` blocks. Not asked for the last key of the caller's alone."""
        if self._borrowing is None or num_here >= len(keys):
            return None
        row = entry.rows.get(keys[num_here], NO_PARENT)
        if row != NO_PARENT and self._blocks.table.state_at[row] != NONE:
            return None  # an engine here writes it now
        return self._borrowing.offer(entry, keys, num_here, now_s)

    def _borrow(self, entry: Namespace, keys: Sequence[bytes], start: int, needed: Rows, now_s: float) -> Rows:
        """Order blocks from `start` on from another node, as far as one has them and there is room, sparing `needed`."""
        offer = self._offer_behind(entry, keys, start, now_s)
        if offer is None:
            return NO_ROWS
        assert self._borrowing is not None
        known = self._index.find_all(entry, keys[: offer.num_blocks])
        here = np.flatnonzero((known[start:] != NO_PARENT) & (self._blocks.table.state[known[start:]] != NONE))
        end = start + int(here[0]) if len(here) else offer.num_blocks
        self._make_room(entry, end - start, np.concatenate((needed, known[:start])), NO_PARENT)
        end = min(end, start + self._blocks.slots.num_free(entry.slot_nbytes))
        if end <= start:
            return NO_ROWS
        rows = self._add_unknown(entry, keys[:end], self._index.find_all(entry, keys[:end]), NO_PARENT)[start:]
        self._borrowing.order(entry, keys[:end], start, rows, offer, now_s)
        return rows

    def _ready(self, lease: Lease) -> bytes:
        """ReadGrant.ready of a live lease. A block that was dropped on its way is LEAVING, and may still be to come."""
        state = self._blocks.table.state[lease.rows]
        ready: NDArray[np.bool_] = lease.pending & (state != ARRIVING)
        for i in np.flatnonzero(ready & (state == LEAVING)).tolist():
            ready[i] = int(lease.rows[i]) not in self._waiting
        return ready.tobytes()

    def _is_redundant(self, row: int) -> bool:
        """Whether nobody here is going to read a copy in RAM soon, and it can be had back: each engine of the namespace has the
        block itself, and a drive keeps it for the time when one gives it up."""
        if self.presence.is_empty or self._spill.nvme.table.state_at[row] != READY:
            return False
        return self.presence.is_everywhere(self._index.namespace_of(row).namespace, self._index.keys[row])

    def _offer_redundant(self, entry: Namespace, keys: Sequence[bytes]) -> None:
        """Copies of these in RAM may have become redundant."""
        if not self.presence.is_empty and self._has_drives:
            rows = self._index.find_all(entry, keys)
            self._blocks.offer(rows[rows != NO_PARENT])

    def _give_up(self, row: int) -> None:
        """A block that leases wait for will not come."""
        for lease in self._waiting.pop(row, ()):
            if self._leases.give_up(lease, row):
                self._blocks.table.refs[row] -= 1
                if self._slab is not None and self._leases.find_any(lease.lease_id) is None:
                    self._slab.end(lease.lease_id)

    def _is_wanted(self, row: int) -> bool:
        """Whether a lease that has rights waits for the block."""
        return any(self._leases.is_live(lease) for lease in self._waiting.get(row, ()))

    def _stop_waiting(self, lease: Lease) -> None:
        """A read lease has ended or expired: what it alone waited for need not be read."""
        if not self._waiting:
            return
        unwanted = [row for row in lease.rows.tolist() if row in self._waiting and not self._is_wanted(row)]
        self._spill.cancel(unwanted)
        if self._borrowing is not None:
            self._borrowing.cancel(unwanted)

    def _add_unknown(self, entry: Namespace, keys: Sequence[bytes], rows: Rows, parent_row: int) -> Rows:
        """Rows of all keys; -1 in `rows` means a key without a row yet."""
        unknown = np.flatnonzero(rows == NO_PARENT)
        rows = rows.copy()
        rows[unknown] = self._index.new_rows(len(unknown))
        self._spill.grow()
        parents = np.append(parent_row, rows[:-1])
        self._index.add(entry, [keys[i] for i in unknown.tolist()], parents[unknown], rows[unknown])
        return rows

    def _find(self, entry: Namespace, keys: Sequence[bytes], parent: bytes) -> tuple[Rows, int]:
        return self._index.find_all(entry, keys), entry.rows.get(parent, NO_PARENT)

    def _first_declined(self, rows: Rows, parent: bytes, parent_row: int) -> tuple[int, str]:
        """Where the run of keys that can be held ends if there is room for them, and why."""
        table = self._blocks.table
        leaving = np.flatnonzero((rows != NO_PARENT) & (table.state[rows] == LEAVING))
        end = int(leaving[0]) if len(leaving) else len(rows)
        orphan = parent and (parent_row == NO_PARENT or not self._is_held(parent_row))
        if orphan and end and len(self._not_held(rows[:1])):
            return 0, "orphan"
        return end, "leaving" if end < len(rows) else ""

    def _let_go(self, rows: Rows) -> None:
        self._pins.let_go(rows)
        self._offer(rows)

    def _offer(self, rows: Rows) -> None:
        for tier in self._tiers():
            tier.offer(rows)

    def _tiers(self) -> list[Inventory]:
        """Whatever has slots and an eviction order of its own: RAM, drives and slab, as far as they are there."""
        tiers = [self._blocks, self._spill.nvme] if self._has_drives else [self._blocks]
        return tiers if self._slab is None else [*tiers, self._slab.blocks]

    def _drop(self, entry: Namespace, rows: Rows) -> int:
        """Remove blocks of a namespace, given with everything below them; how many are no longer found or written."""
        pinned, nvme = self._blocks.table.state[rows], self._spill.nvme.table.state[rows]
        num_dropped = int(np.count_nonzero(np.isin(pinned, _HELD) | np.isin(nvme, _HELD)))
        if self._slab is not None:
            self._slab.drop(entry, rows)
        self._blocks.drop(entry, rows)
        self._spill.drop(entry, rows)
        self._index.forget_dead(rows)
        return num_dropped

    @staticmethod
    def _with_drop(known: set[bytes] | None, keys: Sequence[bytes] | None) -> set[bytes] | None:
        """What is to be dropped once more when the drives are there. More than MAX_KEYS_PER_CALL keys: the whole namespace."""
        if known is None or keys is None or len(known) + len(keys) > MAX_KEYS_PER_CALL:
            return None
        return known.union(keys)

    def _drop_outlived(self, rows: Rows) -> None:
        for number in np.unique(self._index.namespace[rows]).tolist():
            own = self._index.with_descendants(np.unique(rows[self._index.namespace[rows] == number]))
            self._counters["outlived_blocks_total"] += self._drop(self._index.namespaces[number], own)

    def _is_held(self, row: int) -> bool:
        """Whether children of the block can be found once they are stored."""
        return self._blocks.table.state_at[row] in _HELD or self._spill.nvme.table.state_at[row] in _HELD

    def _not_held(self, rows: Rows) -> Rows:
        """Positions of those without a row or without a copy in RAM."""
        return np.flatnonzero((rows == NO_PARENT) | (self._blocks.table.state[rows] == NONE))

    def _make_room(self, entry: Namespace, count: int, rows: Rows, parent_row: int) -> int:
        """Evict until `count` blocks fit, sparing the call's own blocks; how many went."""
        own = np.append(rows, parent_row)
        own = own[own != NO_PARENT]
        evicted = self._blocks.make_room(entry, count, own[self._blocks.table.state[own] == READY])
        self._counters["evicted_blocks_total"] += evicted.num_blocks
        self._counters["lost_blocks_total"] += evicted.num_lost if self._has_drives else 0
        return evicted.num_blocks

    def _count_reserve(self, num_granted: int, end: int, num_keys: int, reason: str) -> None:
        self._counters["reserved_blocks_total"] += num_granted
        self._counters["held_blocks_total"] += end - num_granted
        if reason:
            self._counters[f"declined_blocks_{reason}_total"] += num_keys - end

    def _find_request(self, holder: Holder, kind: LeaseKind, request_id: str, request: bytes) -> Lease | None:
        return self._leases.find_request(holder, kind, request_id, request) if request_id else None

    def _check_allowed(self, instance: bytes) -> None:
        try:
            self._leases.check_allowed(instance, int(self._limbo_fraction * self._blocks.slots.capacity_bytes))
        except LeaseRefused:
            self._counters["refused_leases_total"] += 1
            raise

    def _grant(  # noqa: PLR0917 - a private call with the verb's own arguments
        self,
        holder: Holder,
        kind: LeaseKind,
        request_id: str,
        request: bytes,
        entry: Namespace,
        rows: Rows,
        expires_s: float,
    ) -> Lease:
        self._counters["granted_leases_total"] += 1
        return self._leases.grant(
            holder,
            kind,
            request_id,
            request,
            rows=rows,
            slots=self._blocks.table.slots(rows),
            slot_nbytes=entry.slot_nbytes,
            expires_s=expires_s,
        )

    def _expire(self, lease: Lease) -> None:
        """Rights end now; memory that the holder may still touch stays untouched by others until it confirms. A node only
        reads, and compares generations and checksums behind it: what was lent needs no confirmation."""
        self._counters["expired_leases_total"] += 1
        if lease.lent:
            self._end(lease)
            return
        self._leases.expire(lease)
        if lease.kind is LeaseKind.READ:
            self._stop_waiting(lease)
            if self._slab is not None:
                self._slab.expire(lease.lease_id)
        else:
            rows = lease.rows[lease.pending]
            self._counters["expired_blocks_total"] += len(rows)
            self._blocks.to_limbo(rows)

    def _end_expired(self, instance: bytes, kept: set[int]) -> None:
        for lease in self._leases.of_instance(instance):
            if lease.expired and lease.lease_id not in kept:
                self._end(lease)

    def _end(self, lease: Lease) -> None:
        rows = lease.rows[lease.pending]
        self._leases.end(lease)
        if lease.kind is LeaseKind.READ:
            self._stop_waiting(lease)
            if self._slab is not None:
                self._slab.end(lease.lease_id)
            self._blocks.unref(rows)
        elif lease.expired:
            offsets, generations = lease.slots
            self._blocks.slots.free_many(SlotArrays(offsets[lease.pending], generations[lease.pending]))
        else:
            self._counters["aborted_blocks_total"] += len(rows)
            self._blocks.discard(rows)


def _of_lease(lease: Lease, keys: Sequence[bytes]) -> NDArray[np.bool_]:
    """Which of the lease's blocks `keys` are."""
    wanted = set(keys)
    chosen = np.array([key in wanted for key in lease.keys], np.bool_)
    if np.count_nonzero(chosen) != len(wanted):
        raise ProtocolError(f"keys: some are not blocks of lease {lease.lease_id}", field="keys", value=lease.lease_id)
    return chosen


def _check_count(keys: Sequence[bytes]) -> None:
    if len(keys) > MAX_KEYS_PER_CALL:
        raise Overloaded(
            f"keys: {len(keys)} in one call; use at most {MAX_KEYS_PER_CALL} (MAX_KEYS_PER_CALL)",
            limit="MAX_KEYS_PER_CALL",
            value=len(keys),
        )


def _check_keys(keys: Sequence[bytes]) -> None:
    _check_count(keys)
    if not keys:
        raise ProtocolError("keys: empty; reserve at least one", field="keys", value=0)
    _check_distinct(len(set(keys)), len(keys))


def _check_distinct(num_distinct: int, count: int) -> None:
    if num_distinct != count:
        raise ProtocolError("keys: the same key twice; a prefix has each once", field="keys", value=count)


def _statuses(numbers: bytes) -> tuple[KeyStatus, ...]:
    return tuple([_STATUS[number] for number in numbers])


def _write_grant(lease: Lease, entry: Namespace) -> WriteGrant:
    nbytes = entry.spec.block_nbytes
    return WriteGrant(
        lease.lease_id, lease.expires_s, _statuses(lease.statuses), lease.slots, nbytes, lease.declined_reason
    )
