"""Who may use which blocks until when: every lease ends, and what it held comes back only when nobody can touch it."""

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.core.blocks import Holder, SlotArrays
from kvstore.core.errors import LeaseExpired, LeaseRefused, ProtocolError, UnknownLease
from kvstore.core.limits import DEFAULT_LEASE_TTL_S, MAX_LEASE_TTL_S
from kvstore.index import Rows

_HEAP_SLACK = 1024


class LeaseKind(enum.IntEnum):
    """What its holder may do with the blocks."""

    READ = 1
    WRITE = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """The right of an instance to read or write some blocks until `expires_s`.

    A read lease keeps a ref on each of `rows` that is `pending`; those are all of them but for blocks that were on their way
    from a drive and did not come. A write lease owns the slots of those of `rows` that are `pending`, that
    is neither committed nor given up. An `expired` lease has no rights left, but what it held is in limbo until its
    holder confirms that it stopped: `rows` keep their refs (read), `slots` of the pending ones stay unused (write).
    """

    lease_id: int
    holder: Holder
    kind: LeaseKind
    request: bytes  # fingerprint of everything that was asked for
    request_id: str
    expires_s: float
    slot_nbytes: int
    rows: Rows
    slots: SlotArrays
    pending: NDArray[np.bool_]
    first_needed: int = 0  # read: num_blocks is first_needed + len(rows)
    keys: Sequence[bytes] = ()  # write: of `rows`
    statuses: bytes = b""  # write: one KeyStatus a key
    declined_reason: str = ""
    expired: bool = False
    lent: bool = False  # read: to another node, which checks what it has read; so its end needs no confirmation

    @property
    def held_bytes(self) -> int:
        """Bytes, by slot, that the lease keeps from others."""
        return int(np.count_nonzero(self.pending)) * self.slot_nbytes


@dataclass(slots=True)
class _Instance:
    """Leases of one engine. `limbo_bytes` counts a block once for each expired lease that holds it."""

    leases: dict[int, Lease] = field(default_factory=dict)
    requests: dict[tuple[LeaseKind, str], Lease] = field(default_factory=dict)
    num_expired: int = 0
    limbo_bytes: int = 0


class LeaseTable:
    """All leases, by id, by instance, by request and by time. Knows no block: what an end means for blocks, Store does.

        grant -> live --end---------------------> gone      released, aborted, everything committed
                  | expire (time, connection)
                  v
                expired --end-------------------> gone      its holder confirmed, or cannot touch memory any more

    A lease belongs to the instance: any of its sessions may use it, another instance does not know it.
    """

    def __init__(self, *, max_leases_per_instance: int) -> None:
        self._max_leases = max_leases_per_instance
        self._last_id = 0
        self._leases: dict[int, Lease] = {}
        self._instances: dict[bytes, _Instance] = {}
        self._expiries: list[tuple[float, int]] = []  # heap; one entry a live lease, never later than its expiry

    @property
    def num_live(self) -> int:
        """Leases with rights."""
        return len(self._leases) - self.num_expired

    @property
    def num_expired(self) -> int:
        """Leases without rights whose end nobody has confirmed."""
        return sum(entry.num_expired for entry in self._instances.values())

    def check_allowed(self, instance: bytes, max_limbo_bytes: int) -> None:
        """Raise LeaseRefused when the instance has too many leases or keeps too much in limbo."""
        entry = self._instances.get(instance)
        if entry is None:
            return
        if len(entry.leases) >= self._max_leases:
            raise LeaseRefused(
                f"the instance has {len(entry.leases)} leases; release some (MAX_LEASES_PER_INSTANCE)",
                limit="MAX_LEASES_PER_INSTANCE",
                value=len(entry.leases),
            )
        if entry.limbo_bytes > max_limbo_bytes:
            raise LeaseRefused(
                f"the instance's expired leases keep {entry.limbo_bytes} bytes, {max_limbo_bytes} are allowed; "
                "confirm them by Release or Abort (MAX_LIMBO_FRACTION)",
                limit="MAX_LIMBO_FRACTION",
                value=entry.limbo_bytes,
            )

    def find_request(self, holder: Holder, kind: LeaseKind, request_id: str, request: bytes) -> Lease | None:
        """The live lease granted for this very request. Raises ProtocolError when the id was used for another one."""
        entry = self._instances.get(holder.instance)
        lease = entry.requests.get((kind, request_id)) if entry else None
        if lease is not None and lease.request != request:
            raise ProtocolError(
                f"request_id: {request_id!r} was used with other arguments, and that lease is still live",
                field="request_id",
                value=request_id,
            )
        return lease

    def grant(
        self,
        holder: Holder,
        kind: LeaseKind,
        request_id: str,
        request: bytes,
        *,
        rows: Rows,
        slots: SlotArrays,
        slot_nbytes: int,
        expires_s: float,
    ) -> Lease:
        """A new live lease under an id never used before."""
        assert len(rows) == len(slots.offsets) > 0
        if len(self._expiries) > 2 * len(self._leases) + _HEAP_SLACK:
            self._rebuild_expiries()
        self._last_id += 1
        lease = Lease(
            lease_id=self._last_id,
            holder=holder,
            kind=kind,
            request=request,
            request_id=request_id,
            expires_s=expires_s,
            slot_nbytes=slot_nbytes,
            rows=rows,
            slots=slots,
            pending=np.ones(len(rows), np.bool_),
        )
        entry = self._instances.setdefault(holder.instance, _Instance())
        self._leases[lease.lease_id] = entry.leases[lease.lease_id] = lease
        if request_id:
            assert (kind, request_id) not in entry.requests
            entry.requests[kind, request_id] = lease
        heapq.heappush(self._expiries, (expires_s, lease.lease_id))
        return lease

    def find(self, holder: Holder, lease_id: int) -> Lease:
        """The instance's lease, live or expired. Raises UnknownLease."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder.instance != holder.instance:
            raise UnknownLease(
                f"lease_id: {lease_id} is not a lease of this instance; it ended, or was granted before a restart",
                lease_id=lease_id,
            )
        return lease

    def find_live(self, holder: Holder, lease_id: int) -> Lease:
        """The instance's live lease. Raises UnknownLease, LeaseExpired."""
        lease = self.find(holder, lease_id)
        if lease.expired:
            raise LeaseExpired(
                f"lease_id: {lease_id} has expired; Release or Abort confirms its end", lease_id=lease_id
            )
        return lease

    def renew(self, lease: Lease, expires_s: float) -> None:
        """Move a live lease's expiry, never to an earlier time."""
        assert not lease.expired
        lease.expires_s = max(lease.expires_s, expires_s)

    def pop_due(self, now_s: float) -> list[Lease]:
        """Live leases whose time is up; the caller expires each."""
        due = []
        while (first := self._first_expiry()) is not None and first.expires_s <= now_s:
            heapq.heappop(self._expiries)
            due.append(first)
        return due

    def next_expiry_s(self) -> float | None:
        """When the next live lease expires."""
        first = self._first_expiry()
        return None if first is None else first.expires_s

    def expire(self, lease: Lease) -> None:
        """Live -> expired."""
        assert not lease.expired
        lease.expired = True
        entry = self._instances[lease.holder.instance]
        entry.num_expired += 1
        entry.limbo_bytes += lease.held_bytes
        self._drop_request(entry, lease)

    def end(self, lease: Lease) -> None:
        """Live or expired -> gone. `pending` must be as it was when it expired."""
        del self._leases[lease.lease_id]
        entry = self._instances[lease.holder.instance]
        del entry.leases[lease.lease_id]
        if lease.expired:
            entry.num_expired -= 1
            entry.limbo_bytes -= lease.held_bytes
        else:
            self._drop_request(entry, lease)
        if not entry.leases:
            del self._instances[lease.holder.instance]

    def find_any(self, lease_id: int) -> Lease | None:
        """Whoever holds it, live or expired."""
        return self._leases.get(lease_id)

    def is_live(self, lease: Lease) -> bool:
        """Whether it has rights."""
        return not lease.expired and self._leases.get(lease.lease_id) is lease

    def give_up(self, lease: Lease, row: int) -> bool:
        """A lease holds `row` no longer, since its bytes will not come. With the last one it ends.
        Whether it held it."""
        held = lease.pending & (lease.rows == row)
        if self._leases.get(lease.lease_id) is not lease or not held.any():
            return False
        entry = self._instances[lease.holder.instance]
        before = lease.held_bytes
        lease.pending = lease.pending & ~held
        if lease.expired:
            entry.limbo_bytes -= before - lease.held_bytes
        if not lease.pending.any():
            self.end(lease)
        return True

    def of_instance(self, instance: bytes) -> list[Lease]:
        """All leases of an instance, oldest first."""
        entry = self._instances.get(instance)
        return list(entry.leases.values()) if entry else []

    def all_leases(self) -> list[Lease]:
        """Every lease, oldest first."""
        return list(self._leases.values())

    def check(self) -> None:
        """I6: every live lease has a time at which it ends. The views agree with each other."""
        entries = dict(reversed([(lease_id, expires_s) for expires_s, lease_id in self._expiries]))
        for lease in self._leases.values():
            entry = self._instances[lease.holder.instance]
            assert entry.leases[lease.lease_id] is lease
            assert lease.pending.any(), "a lease that holds nothing has not ended"
            if not lease.expired:
                assert entries[lease.lease_id] <= lease.expires_s
                assert not lease.request_id or entry.requests[lease.kind, lease.request_id] is lease
        for entry in self._instances.values():
            expired = [lease for lease in entry.leases.values() if lease.expired]
            assert entry.leases
            assert entry.num_expired == len(expired)
            assert entry.limbo_bytes == sum(lease.held_bytes for lease in expired)
            assert all(not lease.expired and lease.lease_id in entry.leases for lease in entry.requests.values())
        assert sum(len(entry.leases) for entry in self._instances.values()) == len(self._leases)

    def _drop_request(self, entry: _Instance, lease: Lease) -> None:
        if lease.request_id:
            del entry.requests[lease.kind, lease.request_id]

    def _first_expiry(self) -> Lease | None:
        """The live lease at the top of the heap, after putting right what was renewed or ended since."""
        while self._expiries:
            expires_s, lease_id = self._expiries[0]
            lease = self._leases.get(lease_id)
            if lease is None or lease.expired:
                heapq.heappop(self._expiries)
            elif lease.expires_s != expires_s:
                heapq.heapreplace(self._expiries, (lease.expires_s, lease_id))
            else:
                return lease
        return None

    def _rebuild_expiries(self) -> None:
        self._expiries = [(lease.expires_s, i) for i, lease in self._leases.items() if not lease.expired]
        heapq.heapify(self._expiries)


def fingerprint(namespace: bytes, keys: Sequence[bytes], argument: bytes) -> bytes:
    """16 bytes that stand for a request, so that a lease need not keep its keys."""
    return xxhash.xxh3_128_digest(b"".join((namespace, bytes([len(argument)]), argument, *keys)))


def expiry_s(ttl_s: float, now_s: float) -> float:
    """When a lease asked for `ttl_s` ends: 0 or less means DEFAULT_LEASE_TTL_S, more than MAX_LEASE_TTL_S is cut."""
    return now_s + (min(ttl_s, MAX_LEASE_TTL_S) if ttl_s > 0 else DEFAULT_LEASE_TTL_S)
