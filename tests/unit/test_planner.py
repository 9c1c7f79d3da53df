"""The plan: the best cut against every cut, both ends, prices, and what must never be fetched."""

import itertools
import math
import random

import pytest
from worked_examples import EXAMPLES, llama_8b_on_h100

from kvstore.costs import LoadCost, PrefillCost, TierQuote, fetch_s, hybrid_s, meet_tokens
from kvstore.planner import MIN_DEADLINE_S, UNKNOWN_DEADLINE_S, PlanWish, plan

PINNED, NVME, PEER = 0, 1, 2
KV = 131072
H100 = llama_8b_on_h100()
DRIVE = TierQuote(LoadCost(0.002, 6.5e9))


def wish(num_tokens: int, context: int = 0, **options) -> PlanWish:
    return PlanWish(num_tokens, context, **{"block_tokens": 16, "block_nbytes": 16 * KV, **options})


# The worked example: 4,096 tokens on the engine, 8,192 in RAM, 8,192 on a drive, 512 behind them.


def three_tiers(queue_s: float = 0.0, **options):
    (on_engine, _, _), (in_ram, ram_speed, ram_latency), (on_drive, drive_speed, drive_latency) = EXAMPLES["E5"][
        "inputs"
    ]["seg"]
    quotes = {
        PINNED: TierQuote(LoadCost(ram_latency, ram_speed)),
        NVME: TierQuote(LoadCost(drive_latency, drive_speed), queued_bytes=queue_s * drive_speed),
    }
    tiers = bytes([PINNED]) * (in_ram // 512) + bytes([NVME]) * (on_drive // 512)
    asked = PlanWish(EXAMPLES["E5"]["inputs"]["n"], on_engine, 512, 512 * KV, **options)
    return asked, tiers, quotes


@pytest.mark.parametrize(
    ("queue_s", "wait_s", "name"),
    [
        (0.0, 0.0, "q0_parallel"),
        (0.2, 0.0, "nvme_queue_200ms"),
        (0.4, 0.0, "nvme_queue_400ms"),
        (0.4, 0.5, "queue400_but_gpu_busy_500ms"),
    ],
)
def test_e5_three_tiers(queue_s: float, wait_s: float, name: str):
    cut, total_s = EXAMPLES["E5"]["expected"][name]
    asked, tiers, quotes = three_tiers(queue_s, compute_wait_s=wait_s)

    found = plan(asked, tiers, quotes, None, H100)

    assert found.num_blocks == (cut - 4096) // 512
    assert found.total_s == pytest.approx(total_s, rel=1e-9)
    without_s = EXAMPLES["E5"]["expected"]["recompute_all_beyond_hbm"]
    assert found.recompute_s == pytest.approx(wait_s + without_s, rel=1e-9)


def test_e5_tiers_that_share_a_link():
    _, _, quotes = three_tiers()
    shared_s = fetch_s([(quote, 8192 * KV) for quote in quotes.values()], shared_link=True)
    total_s = shared_s + H100.prefill_s(512, 20480)
    assert total_s == pytest.approx(EXAMPLES["E5"]["expected"]["q0_serial"][1], rel=1e-9)


# The best cut.


def brute_force_s(asked: PlanWish, tiers: bytes, quotes, copy, prefill) -> list[float]:
    """J of every m, written down as plainly as it can be."""
    costs = []
    step_s = prefill.t0_s / asked.chunk_tokens if asked.chunk_tokens else 0.0
    for m in range(len(tiers) + 1):
        times = [quotes[tier].load_s(tiers[:m].count(tier) * asked.block_nbytes) for tier in quotes]
        if copy is not None:
            times.append(copy.load_s(m * asked.block_nbytes))
        start = asked.context_tokens + m * asked.block_tokens
        rest_s = prefill.work_s(asked.num_tokens) - prefill.work_s(start) + step_s * (asked.num_tokens - start)
        costs.append(max(asked.compute_wait_s, *times) + prefill.t0_s + rest_s + asked.compute_price * rest_s)
    return costs


def random_case(rng: random.Random):
    runs = [bytes([rng.randrange(3)]) * rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
    tiers = b"".join(runs)
    context = rng.choice([0, 0, 160, 1600])
    asked = wish(
        context + 16 * len(tiers) + rng.choice([1, 5, 500]),
        context,
        chunk_tokens=rng.choice([0, 256, 2048]),
        compute_wait_s=rng.choice([0.0, 0.0, 10 ** rng.uniform(-4, 0)]),
        compute_price=rng.choice([0.0, 0.0, rng.uniform(0, 3)]),
    )
    quotes = {
        tier: TierQuote(
            LoadCost(10 ** rng.uniform(-5, -1), 10 ** rng.uniform(8, 11)), rng.choice([0.0, 10 ** rng.uniform(6, 10)])
        )
        for tier in (PINNED, NVME, PEER)
    }
    copy = rng.choice([None, LoadCost(0.0, 10 ** rng.uniform(8, 11))])
    speed = 10 ** rng.uniform(-6, -3)
    prefill = PrefillCost(
        rng.choice([0.0, 0.01]),
        speed,
        rng.choice([0.0, speed / 10_000, speed / 500]),
        speed / 1000,
        rng.choice([0, 512]),
    )
    return asked, tiers, quotes, copy, prefill


def test_no_cut_is_better_than_the_one_that_is_found():
    """Three tiers in any order, queues, waits, prices, a copy: as good as trying every m. Without a price the request is
    never expected to take longer than by computing all."""
    rng = random.Random(6)
    cuts = set()
    for _ in range(1000):
        asked, tiers, quotes, copy, prefill = random_case(rng)
        every_s = brute_force_s(asked, tiers, quotes, copy, prefill)

        found = plan(asked, tiers, quotes, copy, prefill)

        assert every_s[found.num_blocks] <= min(every_s) * (1 + 1e-9)
        if not asked.compute_price:
            assert found.total_s == pytest.approx(min(every_s), rel=1e-9)
            assert found.total_s <= found.recompute_s * (1 + 1e-9)
        cuts.add("none" if found.num_blocks == 0 else "all" if found.num_blocks == len(tiers) else "some")
    assert cuts == {"none", "some", "all"}


def test_with_time_to_wait_everything_is_fetched():
    found = plan(
        wish(20_000, compute_wait_s=1e6), bytes([NVME]) * 1000, {NVME: TierQuote(LoadCost(1.0, 1e7))}, None, H100
    )
    assert found.num_blocks == 1000


def test_a_busy_engine_fetches_what_an_idle_one_would_compute():
    slow = {NVME: TierQuote(LoadCost(0.002, 3e9))}
    tiers = bytes([NVME]) * 250
    assert plan(wish(4010), tiers, slow, None, H100).num_blocks == 0
    assert plan(wish(4010, compute_price=2.0), tiers, slow, None, H100).num_blocks == 250


@pytest.mark.parametrize("both_ends", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 160, 161, 4096])
def test_the_last_token_is_never_fetched(num_tokens: int, both_ends: bool):
    free = {NVME: TierQuote(LoadCost(0.0, math.inf))}
    asked = wish(num_tokens, both_ends=both_ends, chunk_tokens=512)
    for prefill in (H100, None):
        assert plan(asked, bytes([NVME]) * 300, free, None, prefill).num_blocks == (num_tokens - 1) // 16


def test_the_context_counts_as_tokens_that_are_there():
    free = {NVME: TierQuote(LoadCost(0.0, math.inf))}
    assert plan(wish(161, 96), bytes([NVME]) * 300, free, None, H100).num_blocks == 4


# What may not be used.


def test_a_tier_that_does_not_answer_ends_the_prefix():
    tiers = bytes([PINNED] * 3 + [NVME] * 2 + [PINNED] * 3)
    found = plan(wish(1000), tiers, {NVME: None}, None, H100)
    assert found.num_blocks == 3
    nothing = plan(wish(1000), tiers[3:], {NVME: None}, None, H100)
    assert nothing.num_blocks == 0
    assert nothing.reason == "nvme does not answer"
    assert nothing.total_s == nothing.recompute_s


def test_ram_needs_no_quote_and_costs_the_copy():
    tiers = bytes([PINNED]) * 100
    copied = plan(wish(1700), tiers, {}, LoadCost(0.0, 10e9), H100)
    assert copied.num_blocks == 100
    assert copied.fetch_s == pytest.approx(100 * 16 * KV / 10e9)
    assert plan(wish(1700), tiers, {}, LoadCost(0.0, 1e9), H100).num_blocks == 0
    assert plan(wish(1700), tiers, {PINNED: None}, None, H100).num_blocks == 0


def test_a_copy_that_is_slower_than_the_drive_decides():
    tiers = bytes([NVME]) * 100
    found = plan(wish(1700), tiers, {NVME: DRIVE}, LoadCost(0.0, 5.5e9), H100._replace(a_s=1e-3))
    assert found.fetch_s == pytest.approx(100 * 16 * KV / 5.5e9)


# What is not known.


def test_all_is_fetched_until_it_is_known_what_computing_costs():
    found = plan(wish(1700), bytes([NVME]) * 100, {NVME: DRIVE})
    assert (found.num_blocks, found.both_ends) == (100, False)
    assert "not known" in found.reason
    assert found.deadline_s == UNKNOWN_DEADLINE_S
    both = plan(wish(1700, both_ends=True, chunk_tokens=512), bytes([NVME]) * 100, {NVME: DRIVE})
    assert (both.num_blocks, both.both_ends, both.front_blocks) == (100, True, 0)
    slow = TierQuote(LoadCost(0.002, 1e8))
    long = plan(wish(1700, both_ends=True, chunk_tokens=512), bytes([NVME]) * 100, {NVME: slow})
    assert (long.num_blocks, long.both_ends, long.front_blocks) == (100, True, 50)


# From both ends.


def from_both(num_tokens: int, quote: TierQuote = DRIVE, **options):
    asked = wish(num_tokens, **{"both_ends": True, "chunk_tokens": 512, **options})
    return plan(asked, bytes([NVME]) * ((num_tokens - 1) // 16), {NVME: quote}, None, H100)


def test_from_both_ends_everything_is_fetched_and_they_meet_at_the_optimum():
    found = from_both(32769)
    meet = math.ceil(meet_tokens(H100, DRIVE.load, KV, 32768) / 16)
    assert (found.num_blocks, found.both_ends, found.front_blocks) == (2048, True, meet)
    met_s = hybrid_s(H100, DRIVE.load, KV, 32768)
    assert found.total_s == pytest.approx(met_s + H100.prefill_s(1, 32768), rel=0.01)
    assert found.fetch_s == pytest.approx(DRIVE.load_s(32768 * KV))


def test_a_load_that_is_shorter_than_a_chunk_is_waited_for():
    fast = TierQuote(LoadCost(0.001, 300e9))
    found = from_both(8193, fast)
    assert (found.num_blocks, found.both_ends) == (512, False)


def test_a_few_blocks_behind_a_long_latency_are_computed():
    found = from_both(40, TierQuote(LoadCost(0.1, 1e9)))
    assert found.num_blocks == 0


def test_nothing_is_fetched_of_which_not_one_block_would_be_there_in_time():
    found = from_both(8193, TierQuote(LoadCost(0.002, 6.5e9), queued_bytes=1e12))
    assert found.num_blocks == 0


def test_a_front_in_ram_is_fetched_first_where_the_rest_lies_on_a_slow_drive():
    """From the back the slow blocks come first, and the engine would compute meanwhile what could be had at once."""
    tiers = bytes([PINNED]) * 400 + bytes([NVME]) * 100
    slow = {NVME: TierQuote(LoadCost(0.002, 2e8))}
    found = plan(wish(8001, both_ends=True, chunk_tokens=512), tiers, slow, LoadCost(0.0, 40e9), H100)
    assert not found.both_ends
    assert 400 <= found.num_blocks < 410  # some come while the others are copied


def test_the_dearer_the_engine_the_less_it_computes_at_the_front():
    fronts = [from_both(32769, compute_price=price).front_blocks for price in (0.0, 0.01, 0.7, 0.9, 1e6)]
    assert fronts == sorted(fronts, reverse=True)
    assert 0 < fronts[2] < fronts[0]
    assert fronts[-1] == 0


def test_while_the_engine_is_busy_the_back_goes_on_alone():
    """Once all of it would be there before the engine could begin, nothing is left for the front."""
    found = from_both(8193, compute_wait_s=10.0)
    assert (found.num_blocks, found.front_blocks) == (512, 0)
    assert found.total_s == pytest.approx(10.0 + H100.prefill_s(1, 8192))


def test_both_ends_are_predicted_no_slower_than_either():
    rng = random.Random(7)
    for _ in range(500):
        asked, tiers, quotes, copy, prefill = random_case(rng)
        asked = asked._replace(compute_price=0.0, chunk_tokens=512)
        one_end = plan(asked, tiers, quotes, copy, prefill)
        both = plan(asked._replace(both_ends=True), tiers, quotes, copy, prefill)
        assert both.total_s <= one_end.total_s * (1 + 1e-9)


# Deadlines.


def test_a_deadline_gives_twice_the_time_or_a_quarter_of_computing():
    found = plan(wish(4001), bytes([NVME]) * 250, {NVME: DRIVE}, None, H100)
    computing_s = H100.work_s(4000)
    assert found.deadline_s == pytest.approx(max(2 * found.fetch_s, found.fetch_s + computing_s / 4))
    quick = plan(wish(4001), bytes([NVME]) * 250, {NVME: TierQuote(LoadCost(0, 1e12))}, None, H100)
    assert quick.deadline_s == MIN_DEADLINE_S
    impatient = plan(wish(4001, deadline_s=0.01), bytes([NVME]) * 250, {NVME: DRIVE}, None, H100)
    assert impatient.deadline_s == 0.01


def test_where_nothing_is_fetched_there_is_no_deadline():
    found = plan(wish(4001), b"", {NVME: DRIVE}, None, H100)
    assert found == (0, False, 0, 0.0, found.recompute_s, found.recompute_s, 0.0, "nothing is found behind the context")


# Words.


def test_a_reason_has_the_numbers():
    found = plan(
        wish(4001), bytes([PINNED]) * 50 + bytes([NVME]) * 200, {NVME: DRIVE._replace(queued_bytes=2e6)}, None, H100
    )
    assert found.reason == "nvme 419.4 MB behind 2 MB at 6.5 GB/s: 66.8 ms, computing them 96.1 ms"


def test_segments_as_short_as_they_can_be_are_planned_too():
    tiers = bytes(itertools.islice(itertools.cycle([PINNED, NVME]), 400))
    found = plan(wish(6500), tiers, {NVME: TierQuote(LoadCost(0.0, 20e9))}, None, H100)
    assert found.num_blocks == 400


def test_a_load_that_is_not_worth_both_ends_comes_from_the_back_so_that_a_late_one_meets_the_front():
    """Unless it is over before that could matter, or lies in RAM, or only a part is fetched, or the engine cannot."""
    found = from_both(2001, TierQuote(LoadCost(0.005, 10e9)), chunk_tokens=2048)
    assert (found.num_blocks, found.both_ends, found.front_blocks) == (125, True, 0)
    assert found.total_s == pytest.approx(found.fetch_s + H100.prefill_s(1, 2000), rel=0.05)
    assert not from_both(101, TierQuote(LoadCost(0.0001, 100e9))).both_ends
    asked = wish(2001, both_ends=True, chunk_tokens=2048)
    slow_ram = {PINNED: TierQuote(LoadCost(0.0, 10e9))}
    assert not plan(asked, bytes([PINNED]) * 125, slow_ram, None, H100).both_ends
    assert not plan(asked._replace(both_ends=False), bytes([NVME]) * 125, {NVME: DRIVE}, None, H100).both_ends
