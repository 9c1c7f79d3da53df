"""Every token that was asked for is a hit in one tier or a miss for one reason."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.keys import KVSpec
from kvstore.core.limits import LOAD_SETTLE_S, MAX_OPEN_REQUESTS, REQUEST_SETTLE_S
from kvstore.core.plans import FetchPlan, Match, MatchWish
from kvstore.usage import MISSES, NO_TENANT, OTHER_TENANTS, Tenants, Usage

ENGINE = b"engine one......"
SPEC = KVSpec(weights="w", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16")
BLOCK = SPEC.block_tokens
KEYS = [bytes([i]) * 16 for i in range(10)]


def plan(num_blocks: int, *, both_ends: bool = False, deadline_s: float = 0.0) -> FetchPlan:
    return FetchPlan(num_blocks, both_ends, 0, 0.1, 1.0, 0.1, deadline_s, "")


class Asking:
    """A Usage, and an engine with prompts of ten blocks and five tokens. Checked after every step."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.num_plans = 0

    def match(
        self,
        tiers: bytes,
        *,
        take: int | None = None,
        first: int = 0,
        request_id: str = "r",
        name: str = "",
        now_s: float = 0.0,
        tenant: str = "",
        reason: str = "never_stored",
        **options: Any,
    ) -> int:
        """The plan's number. `take`: what the plan fetches; None: no wish, but a `name` perhaps."""
        missing = {reason: len(KEYS) - len(tiers)} if len(tiers) < len(KEYS) else {}
        if take is None:
            match, wish = Match(len(tiers), tiers), None
        else:
            self.num_plans += 1
            match = Match(len(tiers), tiers, plan(take, **options), self.num_plans)
            wish = MatchWish(request_id, BLOCK * len(KEYS) + 5, first)
        self.usage.matched(ENGINE, tenant, BLOCK, KEYS, match, missing, wish, name, now_s)
        self.usage.check()
        return match.plan_id

    def acquire(
        self, plan_id: int, lease_id: int, granted: int, *, first: int = 0, last: int = 10, now_s: float = 0.0
    ) -> None:
        self.usage.acquired(ENGINE, "", SPEC, KEYS[:last], first, plan_id, lease_id, b"\1" * granted, now_s)
        self.usage.check()

    def release(
        self, lease_id: int, outcome: str, num_loaded: int = 0, *, seconds: float = 0.1, awaited: int = 0
    ) -> int:
        nbytes = self.usage.released(ENGINE, lease_id, outcome, num_loaded, seconds, awaited)
        self.usage.check()
        return nbytes

    @property
    def blocks(self) -> tuple[dict[str, float], dict[str, float]]:
        """Hits and misses, in blocks; the tail's five tokens aside."""
        total = self.usage.total
        return (
            {name: tokens / BLOCK for name, tokens in total.hits.items()},
            {name: tokens / BLOCK for name, tokens in total.misses.items() if name != "tail"},
        )


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_a_load_counts_by_the_tier_that_each_block_lay_in(asking: Asking) -> None:
    plan_id = asking.match(bytes([0, 0, 0, 1, 1, 2, 2, 2]), take=8)
    asking.acquire(plan_id, 1, 8, last=8)
    assert asking.release(1, "loaded", 8) == 8 * SPEC.block_nbytes

    assert asking.blocks == ({"pinned": 3, "nvme": 2, "peer": 3}, {"never_stored": 2})
    assert asking.usage.total.requested == 165
    assert asking.usage.total.misses["tail"] == 5


def test_what_the_engine_has_itself_is_a_hit_of_its_own_memory(asking: Asking) -> None:
    plan_id = asking.match(bytes(10), take=7, first=3)
    asking.acquire(plan_id, 1, 7, first=3)
    asking.release(1, "loaded", 7)

    assert asking.blocks == ({"hbm": 3, "pinned": 7}, {})


def test_what_a_plan_leaves_to_be_computed_was_too_slow(asking: Asking) -> None:
    plan_id = asking.match(bytes([0] * 4 + [1] * 6), take=4)
    asking.acquire(plan_id, 1, 4, last=4)
    asking.release(1, "loaded", 4)

    assert asking.blocks == ({"pinned": 4}, {"too_slow": 6})


@pytest.mark.parametrize(
    ("outcome", "num_loaded", "options", "expected"),
    [
        ("partly", 4, {}, ({"pinned": 4}, {"failed": 6})),
        ("failed", 0, {}, ({}, {"failed": 10})),
        ("partly", 4, {"awaited": 2}, ({"pinned": 4}, {"over_deadline": 6})),
        ("partly", 4, {"seconds": 2.5}, ({"pinned": 4}, {"over_deadline": 6})),
        ("cancelled", 0, {}, ({}, {"cancelled": 10})),
    ],
)
def test_a_load_that_came_to_less_says_why(
    asking: Asking, outcome: str, num_loaded: int, options: dict[str, Any], expected: object
) -> None:
    asking.acquire(asking.match(bytes(10), take=10, deadline_s=2.0), 1, 10)
    asking.release(1, outcome, num_loaded, **options)

    assert asking.blocks == expected


def test_a_load_from_the_back_counts_the_last_blocks(asking: Asking) -> None:
    asking.acquire(asking.match(bytes([0] * 6 + [1] * 4), take=10, both_ends=True), 1, 10)
    asking.release(1, "loaded", 5)

    assert asking.blocks == ({"pinned": 1, "nvme": 4}, {"computed_first": 5})


def test_what_is_not_granted_is_missed(asking: Asking) -> None:
    asking.acquire(asking.match(bytes(10), take=10), 1, 6)
    asking.release(1, "loaded", 6)
    asking.acquire(asking.match(bytes(10), take=10), 0, 0)

    assert asking.blocks == ({"pinned": 6}, {"not_granted": 14})


def test_a_request_that_asks_again_counts_once(asking: Asking) -> None:
    for second in range(4):
        asking.match(b"", take=0, now_s=float(second))
    asking.usage.settle_old(3 + REQUEST_SETTLE_S - 0.1)

    assert asking.usage.total.num_requests == 0
    asking.usage.settle_old(3 + REQUEST_SETTLE_S)
    assert asking.usage.total.num_requests == 1
    assert asking.blocks == ({}, {"never_stored": 10})


@pytest.mark.parametrize("tiers", [b"", bytes(4)])
def test_a_request_without_a_plan_that_asks_again_counts_once_by_its_name(asking: Asking, tiers: bytes) -> None:
    for second in range(3):
        asking.match(tiers, name="r", now_s=float(second))
    asking.match(tiers, name="another", now_s=3.0)
    if tiers:
        asking.acquire(0, 1, 4, last=4, now_s=3.0)
        asking.release(1, "loaded", 4)
    asking.usage.settle_old(3 + REQUEST_SETTLE_S)

    assert asking.usage.total.num_requests == 2
    assert asking.usage.total.misses["never_stored"] == 2 * (10 - len(tiers)) * BLOCK
    assert asking.usage.num_open == 0


def test_who_does_not_take_it_up_and_who_never_returns(asking: Asking) -> None:
    asking.match(bytes(10), take=10, request_id="a")
    asking.acquire(asking.match(bytes(10), take=10, request_id="b"), 1, 10)
    asking.usage.settle_old(LOAD_SETTLE_S)

    assert asking.blocks == ({}, {"not_taken": 10, "unknown": 10})
    assert asking.usage.num_open == 0
    asking.release(1, "loaded", 10)  # too late to count
    assert asking.usage.total.num_requests == 2


def test_without_a_plan_the_last_key_links_match_and_acquire(asking: Asking) -> None:
    asking.match(bytes([0] * 5 + [1] * 3))
    asking.acquire(0, 1, 6, first=2, last=8)
    asking.release(1, "loaded")

    assert asking.usage.total.num_requests == 1
    assert asking.blocks == ({"hbm": 2, "pinned": 3, "nvme": 3}, {"never_stored": 2})
    assert asking.usage.num_open == 0


def test_a_miss_without_a_wish_counts_at_once(asking: Asking) -> None:
    asking.match(b"", reason="evicted")

    assert asking.blocks == ({}, {"evicted": 10})


def test_an_acquire_without_a_match_counts(asking: Asking) -> None:
    asking.acquire(0, 1, 7)
    asking.acquire(0, 1, 7)  # the same call again
    asking.release(1, "loaded", 7)

    assert asking.usage.total.num_requests == 1
    assert asking.blocks == ({"pinned": 7}, {"not_granted": 3})


def test_another_engine_cannot_take_up_the_plan(asking: Asking) -> None:
    plan_id = asking.match(bytes(10), take=10)
    asking.usage.acquired(b"engine two......", "", SPEC, KEYS, 0, plan_id, 1, b"\1" * 10, 0.0)
    asking.usage.check()

    assert asking.usage.num_open == 2


def test_open_requests_are_bounded(asking: Asking) -> None:
    usage = asking.usage
    for i in range(MAX_OPEN_REQUESTS + 3):
        usage.matched(ENGINE, "", BLOCK, KEYS[:1], Match(1, b"\0", plan(1), i + 1), {}, MatchWish(str(i), 17), "", 0.0)

    assert usage.num_open == MAX_OPEN_REQUESTS
    assert usage.total.num_requests == 3
    usage.check()


def test_tenants_beyond_the_labels_are_one() -> None:
    tenants = Tenants(max_labels=2, max_candidates=2)
    for tenant, tokens in [("", 30), ("big", 100), ("small", 10), ("tiny", 1), ("least", 1)]:
        tenants.account(tenant, tokens).add(1, tokens, {"pinned": tokens}, {})
        tenants.check()

    accounts = {label: account.requested for label, account in tenants.accounts()}
    assert accounts == {NO_TENANT: 30, "big": 100, OTHER_TENANTS: 12}
    assert tenants.label("small") == OTHER_TENANTS


def test_a_tenant_that_grows_takes_the_place_of_the_least() -> None:
    tenants = Tenants(max_labels=2)
    for tenant, tokens in [("a", 10), ("b", 100), ("c", 15), ("c", 15)]:
        tenants.account(tenant, tokens).add(1, tokens, {"pinned": tokens}, {})
        tenants.check()

    accounts = {label: account.requested for label, account in tenants.accounts()}
    assert accounts == {"b": 100, "c": 15, OTHER_TENANTS: 25}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_engines_do_the_law_holds(data: st.DataObject) -> None:
    """Any order of calls, with any numbers that the protocol lets through."""
    asking = Asking()
    now_s, plan_ids, lease_ids = 0.0, [0], 0
    asked = Counter[str]()
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 1.0, 6.0, 70.0]))
        match data.draw(st.sampled_from(["match", "acquire", "release", "settle"])):
            case "match":
                tiers = bytes(data.draw(st.lists(st.integers(0, 2), max_size=10)))
                first = data.draw(st.integers(0, len(tiers)))
                wished = data.draw(st.booleans())
                take = data.draw(st.integers(0, len(tiers) - first)) if wished else None
                options = {"both_ends": data.draw(st.booleans())} if wished else {}
                tenant, request_id = data.draw(st.sampled_from(["", "t"])), data.draw(st.sampled_from(["a", "b"]))
                plan_ids.append(
                    asking.match(
                        tiers,
                        take=take,
                        first=first if wished else 0,
                        request_id=request_id,
                        now_s=now_s,
                        tenant=tenant,
                        reason=data.draw(st.sampled_from(sorted(MISSES))),
                        **options,
                    )
                )
                asked["match"] += 1
            case "acquire":
                lease_ids += 1
                last = data.draw(st.integers(0, 10))
                first = data.draw(st.integers(0, last))
                granted = data.draw(st.integers(0, last - first))
                plan_id = data.draw(st.sampled_from(plan_ids))
                asking.acquire(plan_id, lease_ids if granted else 0, granted, first=first, last=last, now_s=now_s)
                asked["acquire"] += 1
            case "release":
                outcome = data.draw(st.sampled_from(["loaded", "partly", "failed", "cancelled"]))
                lease_id = data.draw(st.integers(0, lease_ids + 1))
                asking.release(lease_id, outcome, data.draw(st.integers(0, 12)), awaited=data.draw(st.integers(0, 2)))
            case _:
                asking.usage.settle_old(now_s)
                asking.usage.check()

    asking.usage.settle_old(now_s + LOAD_SETTLE_S)
    asking.usage.check()
    assert asking.usage.num_open == 0
    assert asking.usage.total.num_requests <= asked.total()
