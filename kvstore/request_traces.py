"""What a sidecar's spans say of the requests that came with a trace context. Made of what the loop knows anyway.

    engine's request
      +- kvstore.match      the plan: what was found where, chosen, why
      +- (kvstore.save)     from Reserve to Commit; the engine's connector makes it
      +- (kvstore.load)     likewise, from Acquire to Release
           +- kvstore.fetch     from Acquire to Release: what was granted, what came of it
                +- kvstore.read     blocks from one drive, from the first order to the last arrival
                +- kvstore.borrow   blocks from another node
                     +- kvstore.lend    there: from Lend to Release, with the reads of its drives below

Loop thread only. Where tracing is off there is none of this class, and whoever would call it looks at that and goes on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.limits import LOAD_SETTLE_S, MAX_OPEN_REQUESTS
from kvstore.core.loans import Fetch, FetchDone
from kvstore.core.moves import DRIVE_SHIFT, Move, MoveDone, Urgency
from kvstore.core.plans import TIERS, ReadGrant
from kvstore.core.traces import Attributes, Span, Tracer, Value, read_traceparent
from kvstore.plan_log import PlanRecord


@dataclass(slots=True)
class _Reads:
    """What a lease got from one drive."""

    first_s: float
    last_s: float
    num_blocks: int = 0
    nbytes: int = 0
    problems: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Lease:
    """One whose request is traced."""

    span: Span
    since_s: float
    about: Attributes
    waits_for: set[int]  # offsets in the arena
    reads: dict[int, _Reads] = field(default_factory=dict)  # by drive


@dataclass(slots=True)
class _Borrowed:
    """A fetch from another node, for a traced lease."""

    span: Span
    fetch: Fetch
    open: set[int]  # blocks
    num_blocks: int = 0
    problems: dict[str, int] = field(default_factory=dict)


class RequestTraces:
    """Spans by lease, and by what their blocks wait for. Time comes in."""

    def __init__(self, tracer: Tracer) -> None:
        self.counts = tracer.counts
        self._tracer = tracer
        self._leases: OrderedDict[int, _Lease] = OrderedDict()  # oldest first; bounded
        self._waiting: dict[int, list[_Lease]] = {}  # by offset in the arena
        self._moves: dict[int, tuple[float, Move]] = {}  # reads in flight, whoever they are for
        self._borrowed: dict[int, _Borrowed] = {}  # by fetch

    # --- verbs ----------------------------------------------------------------------------------------------------------

    def matched(self, traceparent: str, num_found: int, record: PlanRecord | None, since_s: float) -> None:
        """A Match was answered, perhaps with a plan."""
        if parent := read_traceparent(traceparent):
            span = self._tracer.start("kvstore.match", parent, at_s=since_s, kind="server")
            span.end({"kvstore.blocks_found": num_found, **(_plan(record) if record else {})})

    def leased(
        self, name: str, traceparent: str, grant: ReadGrant, about: Attributes, *, since_s: float, now_s: float
    ) -> None:
        """A read lease was asked for, from `since_s` on. What is not in RAM yet is waited for."""
        parent = read_traceparent(traceparent)
        if not parent or grant.lease_id in self._leases:
            return
        span = self._tracer.start(name, parent, at_s=since_s, kind="server")
        if not span.traceparent:
            return  # not sampled
        about = {**about, "kvstore.blocks_granted": len(grant.ready), "kvstore.blocks_in_ram": grant.ready.count(1)}
        if not grant.lease_id:
            span.end({**about, "kvstore.outcome": "not granted"})
            return
        offsets = grant.slots.offsets.tolist()
        lease = _Lease(span, since_s, about, {offsets[i] for i, ready in enumerate(grant.ready) if not ready})
        self._leases[grant.lease_id] = lease
        for offset in lease.waits_for:
            self._waiting.setdefault(offset, []).append(lease)
        self._end_old(now_s)

    def released(self, lease_id: int, outcome: str, num_loaded: int) -> None:
        """A lease was given back; most are of no traced request."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._end(lease, {"kvstore.outcome": outcome, "kvstore.blocks_loaded": num_loaded})

    # --- drives ---------------------------------------------------------------------------------------------------------

    def ordered(self, moves: Sequence[Move], now_s: float) -> None:
        """The drives were told. A read may have begun before the lease that waits for it."""
        self._moves |= {move.move_id: (now_s, move) for move in moves if move.urgency is not Urgency.WRITE}

    def moved(self, done: Sequence[MoveDone], now_s: float) -> None:
        """Moves have ended."""
        for each in done:
            ordered_s, move = self._moves.pop(each.move_id, (0.0, None))
            if move is None:
                continue
            for lease in self._take_waiting(move.arena_offset):
                since_s, drive = max(ordered_s, lease.since_s), move.record.offset >> DRIVE_SHIFT
                reads = lease.reads.setdefault(drive, _Reads(since_s, now_s))
                reads.first_s, reads.last_s = min(reads.first_s, since_s), now_s
                if each.problem is None:
                    reads.num_blocks, reads.nbytes = reads.num_blocks + 1, reads.nbytes + move.record.nbytes
                else:
                    reads.problems[each.problem] = reads.problems.get(each.problem, 0) + 1
                if not lease.waits_for:
                    self._tell_reads(lease)

    # --- other nodes ----------------------------------------------------------------------------------------------------

    def fetching(self, fetches: Sequence[Fetch], now_s: float) -> list[Fetch]:
        """The same, those for traced leases with a trace context for the node that is asked."""
        return [self._fetching(fetch, now_s) for fetch in fetches]

    def fetched(self, done: Sequence[FetchDone], now_s: float) -> None:
        """Blocks have come, or will not."""
        for each in done:
            borrowed = self._borrowed.get(each.fetch_id)
            if borrowed is None or each.block not in borrowed.open:
                continue
            borrowed.open.discard(each.block)
            if each.problem is None:
                borrowed.num_blocks += 1
                self._take_waiting(borrowed.fetch.arena_offsets[each.block])
            else:
                borrowed.problems[each.problem] = borrowed.problems.get(each.problem, 0) + 1
            if not borrowed.open:
                del self._borrowed[each.fetch_id]
                nbytes = borrowed.num_blocks * borrowed.fetch.nbytes
                about: dict[str, Value] = {"kvstore.tier": "peer", "kvstore.node": borrowed.fetch.node_id}
                borrowed.span.end(_outcome(borrowed.num_blocks, nbytes, borrowed.problems) | about, at_s=now_s)

    def _fetching(self, fetch: Fetch, now_s: float) -> Fetch:
        lease = next((each for offset in fetch.arena_offsets for each in self._waiting.get(offset, ())), None)
        if lease is None:
            return fetch
        span = self._tracer.start("kvstore.borrow", lease.span.traceparent, at_s=now_s, kind="client")
        self._borrowed[fetch.fetch_id] = _Borrowed(span, fetch, set(range(len(fetch.arena_offsets))))
        return fetch._replace(traceparent=span.traceparent)

    # --- helpers --------------------------------------------------------------------------------------------------------

    def _take_waiting(self, offset: int) -> list[_Lease]:
        leases = self._waiting.pop(offset, [])
        for lease in leases:
            lease.waits_for.discard(offset)
        return leases

    def _end_old(self, now_s: float) -> None:
        """Nobody gave them back: their engine died."""
        while self._leases:
            lease_id, lease = next(iter(self._leases.items()))
            if len(self._leases) <= MAX_OPEN_REQUESTS and lease.since_s + LOAD_SETTLE_S > now_s:
                return
            del self._leases[lease_id]
            self._end(lease, {"kvstore.outcome": "unknown"})

    def _end(self, lease: _Lease, outcome: Attributes) -> None:
        for offset in lease.waits_for:
            leases = self._waiting[offset]
            leases.remove(lease)
            if not leases:
                del self._waiting[offset]
        self._tell_reads(lease)
        lease.span.end({**lease.about, **outcome})

    def _tell_reads(self, lease: _Lease) -> None:
        for drive, reads in lease.reads.items():
            span = self._tracer.start("kvstore.read", lease.span.traceparent, at_s=reads.first_s)
            about: dict[str, Value] = {"kvstore.tier": "nvme", "kvstore.drive": drive}
            span.end(_outcome(reads.num_blocks, reads.nbytes, reads.problems) | about, at_s=reads.last_s)
        lease.reads.clear()


def _outcome(num_blocks: int, nbytes: int, problems: dict[str, int]) -> dict[str, Value]:
    return {
        "kvstore.blocks": num_blocks,
        "kvstore.bytes": nbytes,
        **{f"kvstore.failed.{reason}": count for reason, count in problems.items()},
    }


def _plan(record: PlanRecord) -> Attributes:
    """Why so much is fetched and no more. Times as predicted."""
    plan, wish = record.plan, record.wish
    return {
        "kvstore.request_id": wish.request_id,
        "kvstore.tokens": wish.num_tokens,
        "kvstore.blocks_on_engine": wish.first_needed,
        **{f"kvstore.found.{TIERS[share.tier]}": share.num_blocks for share in record.tiers},
        "kvstore.plan.id": record.plan_id,
        "kvstore.plan.blocks": plan.num_blocks,
        "kvstore.plan.both_ends": plan.both_ends,
        "kvstore.plan.fetch_s": plan.fetch_s,
        "kvstore.plan.recompute_s": plan.recompute_s,
        "kvstore.plan.total_s": plan.total_s,
        "kvstore.plan.reason": plan.reason,
    }
