"""What became of every token that engines asked for: found in which tier, or missed for which reason.

    Match  -> opened: what is missing, and why; what a plan leaves to be computed     (dispatcher._match)
    Acquire -> what of the rest was granted; without a Match before it, opened here    (dispatcher._acquire)
    Release -> settled: what was loaded, by the tier it lay in at Match; the rest by outcome

Only settled requests are counted, and for each the law holds: **hits by tier + misses by reason = requested**. A Match for the
same request id takes the place of the one before, since engines ask again while a request waits; one that nobody
takes up settles REQUEST_SETTLE_S later. Requests without a plan (fetch always) are found again at their Acquire by their last
key; those without an id too (older clients) count each time they ask. What an engine does not ask for is not here
(`no_read`, or its sidecar is away).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvstore.core.keys import KVSpec
from kvstore.core.limits import (
    LOAD_SETTLE_S,
    MAX_OPEN_REQUESTS,
    MAX_TENANT_CANDIDATES,
    MAX_TENANT_LABELS,
    REQUEST_SETTLE_S,
)
from kvstore.core.plans import TIERS, Match, MatchWish

MISSES = {
    "never_stored": "nobody stored the block, as far as is remembered",
    "evicted": "it was evicted from the last tier that had it",
    "dropped": "it was removed by Drop, or its time to live was over",
    "damaged": "a drive could not give it back, so it was removed",
    "declined": "it was offered, and declined: no space, no parent, or an older copy still in use",
    "being_written": "an engine is writing it now",
    "behind_gap": "it is held, but a block before it is not",
    "unreadable": "it lies on a drive that does not answer now",
    "tail": "behind the last block that was asked for: part of a block, and the token that is always computed",
    "too_slow": "held, but computing was expected to be sooner",
    "not_taken": "held, and worth fetching, but the engine did not take it up",
    "not_granted": "held at Match, but not granted at Acquire: gone meanwhile, or no room in RAM to bring it to",
    "computed_first": "the engine had computed it before it arrived (both ends)",
    "over_deadline": "it had not arrived when the load's deadline was over",
    "failed": "it did not arrive, or could not be copied",
    "cancelled": "the request ended before it was loaded",
    "unknown": "leased and never released: the engine died, or lost its connection",
}
"""Reasons, and what each says of a token."""

NO_TENANT = "(none)"
OTHER_TENANTS = "(other)"
_HBM = TIERS[3]


@dataclass(slots=True)
class Account:
    """Settled requests, in tokens."""

    num_requests: int = 0
    requested: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # by tier
    misses: Counter[str] = field(default_factory=Counter)  # by reason

    def add(self, num_requests: int, requested: int, hits: Mapping[str, int], misses: Mapping[str, int]) -> None:
        """So much more."""
        self.num_requests += num_requests
        self.requested += requested
        for name, tokens in hits.items():
            self.hits[name] += tokens
        for name, tokens in misses.items():
            self.misses[name] += tokens

    def check(self) -> None:
        """The law."""
        assert self.hits.total() + self.misses.total() == self.requested
        assert min([0, *self.hits.values(), *self.misses.values()]) == 0
        assert self.hits.keys() <= set(TIERS)
        assert self.misses.keys() <= MISSES.keys()


@dataclass(slots=True)
class _Request:
    """One that is not settled. `wanted` are the blocks that may still become hits, by tier number."""

    key: object
    instance: bytes
    tenant: str
    block_tokens: int
    requested: int  # tokens
    num_hbm: int  # blocks that the engine had
    wanted: bytes
    misses: Counter[str]  # tokens
    since_s: float
    both_ends: bool = False
    deadline_s: float = 0.0
    plan_id: int = 0
    last_key: bytes = b""
    lease_id: int = 0
    block_nbytes: int = 0

    def miss(self, reason: str, num_blocks: int) -> None:
        if num_blocks > 0:
            self.misses[reason] += num_blocks * self.block_tokens

    def check(self) -> None:
        blocks = self.num_hbm + len(self.wanted)
        assert blocks * self.block_tokens + self.misses.total() == self.requested


class Usage:
    """The account of all requests, and of each tenant's. Loop thread only; time comes in."""

    def __init__(self) -> None:
        self.total = Account()
        self._tenants = Tenants()
        self._matched: OrderedDict[object, _Request] = OrderedDict()  # oldest first; until Acquire
        self._loading: OrderedDict[int, _Request] = OrderedDict()  # by lease, likewise; until Release
        self._by_plan: dict[int, _Request] = {}
        self._by_last_key: dict[tuple[bytes, bytes], list[_Request]] = {}  # of those without a plan
        self._num_unnamed = 0

    @property
    def num_open(self) -> int:
        """Requests that are not settled."""
        return len(self._matched) + len(self._loading)

    def matched(  # noqa: PLR0917 - what a Match is made of
        self,
        instance: bytes,
        tenant: str,
        block_tokens: int,
        keys: list[bytes],
        match: Match,
        missing: Mapping[str, int],
        wish: MatchWish | None,
        request_id: str,
        now_s: float,
    ) -> bool:
        """An engine asked. `missing`: blocks behind those found, by reason; `match.plan` as it was answered. `request_id` names
        it where there is no wish; "": nothing does. Whether it is another request than those that are open."""
        first, plan, name = (wish.first_needed if wish else 0), match.plan, wish.request_id if wish else request_id
        asked = len(keys) * block_tokens
        requested = max(asked, wish.num_tokens) if wish else asked
        end = match.num_blocks if plan is None else min(match.num_blocks, first + plan.num_blocks)
        request = _Request(
            key=(instance, name) if name else self._next_key(),
            instance=instance,
            tenant=tenant,
            block_tokens=block_tokens,
            requested=requested,
            num_hbm=first,
            wanted=match.tiers[first:end],
            misses=Counter(),
            since_s=now_s,
            both_ends=bool(plan and plan.both_ends),
            deadline_s=plan.deadline_s if plan else 0.0,
            plan_id=match.plan_id,
            last_key=keys[end - 1] if plan is None and end > first else b"",
        )
        for reason, num_blocks in missing.items():
            request.miss(reason, num_blocks)
        request.miss("too_slow", match.num_blocks - max(end, first))
        if requested > asked:
            request.misses["tail"] += requested - asked
        if (before := self._matched.get(request.key)) is not None:
            self._forget(before)
        if not name and wish is None and not request.wanted:  # nothing more will be heard of it
            self._settle(request, {})
            return True
        self._matched[request.key] = request
        if request.plan_id:
            self._by_plan[request.plan_id] = request
        if request.last_key:
            self._by_last_key.setdefault((instance, request.last_key), []).append(request)
        if len(self._matched) > MAX_OPEN_REQUESTS:
            self._give_up(next(iter(self._matched.values())), "not_taken")
        self.settle_old(now_s)
        return before is None

    def acquired(  # noqa: PLR0917 - what an Acquire is made of
        self,
        instance: bytes,
        tenant: str,
        spec: KVSpec,
        keys: list[bytes],
        first_needed: int,
        plan_id: int,
        lease_id: int,
        granted: bytes,
        now_s: float,
    ) -> None:
        """A lease, or none (0), on blocks from `first_needed` on; `granted`: for each 1 if it is in RAM, 0 if it is to come."""
        if lease_id in self._loading:
            return  # the same call again
        request = self._taken_up(instance, keys, plan_id)
        if request is None:
            request = self._unmatched(instance, tenant, spec.block_tokens, len(keys), first_needed, granted, now_s)
        else:
            self._forget(request)
            self._narrow(request, first_needed, len(keys))
        request.miss("not_granted", len(request.wanted) - len(granted))
        request.wanted = request.wanted[: len(granted)]
        if not lease_id:
            self._settle(request, {})
            return
        request.lease_id, request.since_s, request.block_nbytes = lease_id, now_s, spec.block_nbytes
        self._loading[lease_id] = request
        if len(self._loading) > MAX_OPEN_REQUESTS:
            self._give_up(next(iter(self._loading.values())), "unknown")

    def released(  # noqa: PLR0917 - what a Release is made of
        self, instance: bytes, lease_id: int, outcome: str, num_loaded: int, seconds: float, num_awaited: int
    ) -> int:
        """An instance says that a lease has ended; it need not be a reader's, nor its own. `outcome` as in PlanRecord;
        `num_awaited` of its blocks had not come. Bytes that were loaded."""
        request = self._loading.get(lease_id)
        if request is None or request.instance != instance:
            return 0
        self._forget(request)
        num_granted = len(request.wanted)
        num_loaded = min(num_loaded, num_granted)
        if outcome == "loaded" and not request.both_ends:
            num_loaded = num_granted  # older clients do not say how many
        late = num_awaited > 0 or 0 < request.deadline_s <= seconds
        rest = "computed_first" if outcome == "loaded" else "cancelled" if outcome == "cancelled" else "failed"
        request.miss("over_deadline" if rest == "failed" and late else rest, num_granted - num_loaded)
        loaded = request.wanted[num_granted - num_loaded :] if request.both_ends else request.wanted[:num_loaded]
        request.wanted = loaded
        self._settle(request, _tokens_by_tier(loaded, request.block_tokens))
        return len(loaded) * request.block_nbytes

    def settle_old(self, now_s: float) -> None:
        """Requests that nobody took up, loads whose end was never told."""
        while self._matched and (oldest := next(iter(self._matched.values()))).since_s + REQUEST_SETTLE_S <= now_s:
            self._give_up(oldest, "not_taken")
        while self._loading and (oldest := next(iter(self._loading.values()))).since_s + LOAD_SETTLE_S <= now_s:
            self._give_up(oldest, "unknown")

    def tenants(self) -> Iterator[tuple[str, Account]]:
        """Those that have a label of their own, and the rest as one."""
        return self._tenants.accounts()

    def label(self, tenant: str) -> str:
        """Under which the tenant is shown now."""
        return self._tenants.label(tenant)

    def check(self) -> None:
        """The law, for all, for each tenant, and for what is open; the tenants together are all."""
        self.total.check()
        together = Account()
        for _, account in self.tenants():
            account.check()
            together.add(account.num_requests, account.requested, account.hits, account.misses)
        assert together == self.total
        self._tenants.check()
        for request in (*self._matched.values(), *self._loading.values()):
            request.check()
        assert all(self._matched[request.key] is request for request in self._by_plan.values())
        assert all(
            found and all(self._matched[request.key] is request for request in found)
            for found in self._by_last_key.values()
        )

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _taken_up(self, instance: bytes, keys: list[bytes], plan_id: int) -> _Request | None:
        if plan_id:
            request = self._by_plan.get(plan_id)
            return request if request is not None and request.instance == instance else None
        found = self._by_last_key.get((instance, keys[-1] if keys else b""))
        return found[-1] if found else None

    def _unmatched(  # noqa: PLR0917
        self, instance: bytes, tenant: str, block_tokens: int, num_keys: int, first: int, granted: bytes, now_s: float
    ) -> _Request:
        """Where its blocks lie was not asked: what is to come is taken to be on a drive. What is not granted may be anything."""
        wanted = granted.translate(_TIER_OF_READY) + bytes(max(0, num_keys - first - len(granted)))
        requested = max(num_keys, first) * block_tokens
        return _Request(self._next_key(), instance, tenant, block_tokens, requested, first, wanted, Counter(), now_s)

    @staticmethod
    def _narrow(request: _Request, first: int, end: int) -> None:
        """The engine takes blocks [first, end) of what was found: less than that at either end, it may."""
        offset = max(0, min(first - request.num_hbm, len(request.wanted)))
        kept = request.wanted[offset : max(offset, end - request.num_hbm)]
        request.miss("not_taken", len(request.wanted) - offset - len(kept))
        request.num_hbm += offset
        request.wanted = kept

    def _give_up(self, request: _Request, reason: str) -> None:
        self._forget(request)
        request.miss(reason, len(request.wanted))
        request.wanted = b""
        self._settle(request, {})

    def _forget(self, request: _Request) -> None:
        """It is not open any more."""
        if request.lease_id:
            del self._loading[request.lease_id]
            return
        del self._matched[request.key]
        self._by_plan.pop(request.plan_id, None)
        if request.last_key:
            found = self._by_last_key[request.instance, request.last_key]
            found.remove(request)
            if not found:
                del self._by_last_key[request.instance, request.last_key]

    def _settle(self, request: _Request, hits: Mapping[str, int]) -> None:
        if request.num_hbm:
            hits = {**hits, _HBM: request.num_hbm * request.block_tokens}
        for account in (self.total, self._tenants.account(request.tenant, request.requested)):
            account.add(1, request.requested, hits, request.misses)

    def _next_key(self) -> int:
        self._num_unnamed += 1
        return self._num_unnamed


class Tenants:
    """An account for each of the MAX_TENANT_LABELS tenants that ask for most, and one for all others.

    A tenant without a label that comes to twice as much as the least of those with one takes its label (as in the Space-Saving
    algorithm, Metwally et al. 2005): that one's account goes to the others, and the new one begins at 0, so that no
    count is in two places and the sum over all tenants is the total at any time.
    """

    def __init__(self, *, max_labels: int = MAX_TENANT_LABELS, max_candidates: int = MAX_TENANT_CANDIDATES) -> None:
        self._max_labels = max_labels
        self._max_candidates = max_candidates
        self._accounts: dict[str, Account] = {}
        self._others = Account()
        self._candidates: Counter[str] = Counter()  # tokens of tenants without a label; of the largest ones

    def account(self, tenant: str, tokens: int) -> Account:
        """Where a request of so many tokens is counted."""
        account = self._accounts.get(tenant)
        if account is None and len(self._accounts) < self._max_labels:
            account = self._accounts[tenant] = Account()
        return account or self._contend(tenant, tokens)

    def label(self, tenant: str) -> str:
        """Under which it is shown."""
        return (tenant or NO_TENANT) if tenant in self._accounts else OTHER_TENANTS

    def accounts(self) -> Iterator[tuple[str, Account]]:
        """By label."""
        for tenant, account in self._accounts.items():
            yield tenant or NO_TENANT, account
        if self._others.num_requests:
            yield OTHER_TENANTS, self._others

    def check(self) -> None:
        """Bounds."""
        assert len(self._accounts) <= self._max_labels
        assert len(self._candidates) <= self._max_candidates
        assert not self._candidates.keys() & self._accounts.keys()

    def _contend(self, tenant: str, tokens: int) -> Account:
        self._candidates[tenant] += tokens
        least = min(self._accounts, key=lambda name: self._accounts[name].requested)
        if self._candidates[tenant] > 2 * self._accounts[least].requested:
            del self._candidates[tenant]
            retired = self._accounts.pop(least)
            self._others.add(retired.num_requests, retired.requested, retired.hits, retired.misses)
            account = self._accounts[tenant] = Account()
            return account
        if len(self._candidates) > self._max_candidates:
            del self._candidates[min(self._candidates, key=lambda name: self._candidates[name])]
        return self._others


def _tokens_by_tier(tiers: Iterable[int], block_tokens: int) -> dict[str, int]:
    return {TIERS[tier]: count * block_tokens for tier, count in Counter(tiers).items()}


_TIER_OF_READY = bytes([1, 0, *range(2, 256)])
