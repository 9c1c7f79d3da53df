"""A tenant beyond its share loses its own blocks first."""

from kvstore.eviction import make_policy
from kvstore.replay.cache import ReplayCache


def held(cache: ReplayCache) -> dict[str, int]:
    return cache.blocks.table.bytes_by_tenant()


def test_a_tenant_that_floods_the_tier_leaves_the_others_their_blocks() -> None:
    hits = {}
    for quota in (1.0, 0.5):
        cache = ReplayCache(100, make_policy("lru", tenant_quota=quota))
        hits[quota] = 0
        for turn in range(50):
            hits[quota] += cache.request(list(range(40)), "quiet")
            first = 1000 + 100 * turn
            cache.request(list(range(first, first + 90)), "loud")
            cache.check()

    assert hits[1.0] < 50 * 40 / 4
    assert hits[0.5] == 49 * 40


def test_what_nobody_needs_a_tenant_may_use() -> None:
    cache = ReplayCache(100, make_policy("adaptive", tenant_quota=0.2))
    cache.request(list(range(90)), "only")

    assert cache.request(list(range(90)), "only") == 90
    assert held(cache) == {"only": 90}


def test_of_several_over_their_share_the_greediest_loses_first() -> None:
    cache = ReplayCache(100, make_policy("lru", tenant_quota=0.3))
    cache.request(list(range(35)), "a")
    cache.request(list(range(65)), "b")

    cache.request(list(range(20)), "c")

    assert held(cache) == {"a": 35, "b": 45, "c": 20}
    cache.check()


def test_a_cooled_block_goes_before_those_of_a_tenant_over_its_share() -> None:
    cache = ReplayCache(10, make_policy("lru", tenant_quota=0.5))
    cache.request([1, 2], "small")
    cache.request(list(range(10, 18)), "large")
    cache.policy.cool([1, 0])  # rows of the small one, tail first

    cache.request([30, 31], "other")

    assert held(cache) == {"small": 0, "large": 8, "other": 2}
