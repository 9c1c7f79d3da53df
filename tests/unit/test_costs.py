"""The cost model: the worked examples, what must hold for any numbers, and its closed forms against plain integration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked_examples import (
    EXAMPLES,
    H100_USD_PER_S,
    kv_bytes,
    llama_8b_on_h100,
    model,
    prefill_of,
    table,
    tiers_of_e3,
)

from kvstore.costs import (
    LoadCost,
    PrefillCost,
    TierQuote,
    block_value,
    break_even_tokens,
    fetch_s,
    full_overlap_s,
    full_overlap_tokens,
    hybrid_s,
    keep_interval_s,
    layerwise_s,
    meet_tokens,
    min_bandwidth,
    mooncake_min_bandwidth,
)

KV = 131072


def close(expected: float, *, relative: float = 1e-9) -> object:
    return pytest.approx(expected, rel=relative, abs=1e-15)


# Worked examples.


def test_e2_minimum_bandwidth_of_llama_70b_on_eight_a800():
    given_, expected = EXAMPLES["E2"]["inputs"], EXAMPLES["E2"]["expected"]
    for efficiency, name in ((1.0, "ours_causal_A800_eta1_GBps"), (0.55, "ours_causal_A800_eta055_GBps")):
        prefill = prefill_of("Llama-3.1-70B", 8, efficiency, peak_flops=given_["G_A800"] / 8)
        assert min_bandwidth(prefill, kv_bytes("Llama-3.1-70B"), given_["p"]) / 1e9 == close(expected[name])


def test_e2_mooncakes_rule():
    given_, expected = EXAMPLES["E2"]["inputs"], EXAMPLES["E2"]["expected"]
    per_layer = 2 * given_["d"] * given_["s"] / given_["gqa"]
    for gpu in ("A800", "H800"):
        found = mooncake_min_bandwidth(
            per_layer, given_["d"], given_[f"G_{gpu}"], given_["p"], a=given_["a"], b=given_["b"]
        )
        assert found / 1e9 == close(expected[f"B_{gpu}_GBps"])


def test_e3_constants_and_prefill_times():
    prefill, expected = llama_8b_on_h100(), EXAMPLES["E3"]["expected"]
    assert prefill.a_s * 1e6 == close(expected["a_us_per_tok"])
    assert prefill.b_s == close(expected["b_s_per_tok2"])
    for tokens in (8192, 32768, 100000):
        assert prefill.prefill_s(tokens) * 1e3 == close(expected[f"C_{tokens}_ms"])


@pytest.mark.parametrize("tier", tiers_of_e3())
def test_e3_break_even_and_load_times(tier: str):
    load, expected = tiers_of_e3()[tier], EXAMPLES["E3"]["expected"]
    assert break_even_tokens(llama_8b_on_h100(), load, KV) == close(expected[f"Nstar_{tier}"])
    assert load.load_s(KV * 32768) * 1e3 == close(expected[f"load_32768_ms_{tier}"])


@pytest.mark.parametrize("tier", EXAMPLES["E4"]["expected"])
def test_e4_overlap(tier: str):
    prefill, load, expected = llama_8b_on_h100(), tiers_of_e3()[tier], EXAMPLES["E4"]["expected"][tier]
    cached, prompt, layers = (EXAMPLES["E4"]["inputs"][name] for name in ("N", "n", "L"))
    suffix_s = prefill.prefill_s(prompt - cached, cached)
    transfer_s = KV * cached / load.bytes_per_s
    found = {
        "load_only_ms": load.load_s(KV * cached) + suffix_s,
        "compute_only_ms": prefill.prefill_s(prompt),
        "x_tokens": meet_tokens(prefill, load, KV, cached) / 1e3,
        "hybrid_ms": hybrid_s(prefill, load, KV, cached) + suffix_s,
        "x_full_overlap": full_overlap_tokens(prefill, load, KV, cached, prompt) / 1e3,
        "hybrid_full_overlap_ms": full_overlap_s(prefill, load, KV, cached, prompt),
        "layerwise_ms": layerwise_s(transfer_s, suffix_s, layers, latency_s=load.latency_s),
    }
    assert {name: value * 1e3 for name, value in found.items()} == {name: close(expected[name]) for name in expected}


def test_e6_minimum_bandwidths():
    for name, expected in EXAMPLES["E6"]["expected"].items():
        model, gpus, efficiency = name.split(" ")
        prefill = prefill_of(model, int(gpus.removeprefix("x")), float(efficiency.removeprefix("eta")))
        found = [min_bandwidth(prefill, kv_bytes(model), tokens) / 1e9 for tokens in (8192, 65536)]
        assert found == [close(value) for value in expected]


def test_e7_storage_intervals_and_the_price_of_prefill():
    given_, expected = EXAMPLES["E7"]["inputs"], EXAMPLES["E7"]["expected"]
    large = prefill_of("Llama-3.1-70B", 8, 0.5)
    for label, prefill, tokens_bytes, num_gpus in (
        ("8B", llama_8b_on_h100(), KV, 1),
        ("70B", large, kv_bytes("Llama-3.1-70B"), 8),
    ):
        usd_per_s = num_gpus * H100_USD_PER_S
        assert prefill.token_s(0) * usd_per_s * 1e6 == close(expected[f"usd_per_Mtok_prefill_{label}"])
        for tier, price in given_["prices_usd_per_byte_s"].items():
            interval_s = keep_interval_s(prefill, tokens_bytes, gpus_usd_per_s=usd_per_s, tier_usd_per_byte_s=price)
            assert interval_s == close(expected[f"tau_{label}_{tier}_s"])


# A kernel database's times, fitted to the same form.


@pytest.mark.parametrize("row", table("prefill_eta"), ids=lambda row: row["setup"])
def test_the_form_gives_back_the_utilisation_at_8192_tokens(row: dict[str, str]):
    """MFU is FLOP over time and peak. The table's is of the database, t0 and efficiencies are of a fit: its error is allowed."""
    shape, num_tokens = model(row["model"]), 8192
    peak_flops = float(row["peak_TFLOPS_each"]) * 1e12 * int(row["n_gpu"])
    full, window = float(shape["attn_flops_per_pair_full"]), int(float(shape["sliding_window"] or 0))
    shape_flops = {
        "params": float(shape["prefill_params_B"]) * 1e9,
        "attention_flops_per_pair": full,
        "window_flops_per_pair": float(shape["attn_flops_per_pair"]) - full,
        "window_tokens": window,
    }
    fitted = PrefillCost.from_flops(
        **shape_flops,
        peak_flops=peak_flops,
        linear_efficiency=float(row["eta_linear"]),
        attention_efficiency=float(row["eta_attn"]),
        t0_s=float(row["t0_ms"]) / 1e3,
    )
    ideal = PrefillCost.from_flops(
        **shape_flops, peak_flops=peak_flops, linear_efficiency=1.0, attention_efficiency=1.0
    )

    utilisation = ideal.prefill_s(num_tokens) / fitted.prefill_s(num_tokens)

    assert utilisation == pytest.approx(float(row["mfu_8192"]), rel=float(row["fit_max_err"]) + 0.01)


# What holds for any numbers.

tokens = st.floats(1, 1e6)
prefills = st.builds(
    PrefillCost,
    t0_s=st.floats(0, 0.1),
    a_s=st.floats(1e-7, 1e-2),
    b_s=st.sampled_from([0.0, 1e-12, 1e-10, 1e-9, 1e-7]),
    window_b_s=st.sampled_from([0.0, 1e-11, 1e-9, 1e-7]),
    window_tokens=st.sampled_from([0, 128, 1024, 4096, 50_000]),
)
loads = st.builds(LoadCost, latency_s=st.floats(0, 1), bytes_per_s=st.floats(1e5, 1e12))
kvs = st.floats(1e3, 1e6)
queues = st.floats(0, 1e10)


@settings(max_examples=60, deadline=None)
@given(prefills, loads, kvs, tokens, queues)
def test_both_ends_are_never_slower_than_the_better_end(prefill, load, kv, num_tokens, queued):
    hybrid = hybrid_s(prefill, load, kv, num_tokens, queued_bytes=queued)
    computed, loaded = prefill.work_s(num_tokens), load.load_s(kv * num_tokens, queued)
    assert hybrid <= min(computed, loaded) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(prefills, loads, kvs, tokens, queues)
def test_where_both_ends_meet_they_have_taken_equally_long(prefill, load, kv, num_tokens, queued):
    meet = meet_tokens(prefill, load, kv, num_tokens, queued_bytes=queued)
    assert 0 <= meet <= num_tokens
    if meet < num_tokens:
        rest_s = load.wait_s(queued) + kv * (num_tokens - meet) / load.bytes_per_s
        assert prefill.work_s(meet) == pytest.approx(rest_s, rel=1e-6, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(prefills, loads, kvs, tokens, st.floats(1, 100))
def test_the_meeting_point_moves_back_with_latency_and_with_slowness(prefill, load, kv, num_tokens, factor):
    meet = meet_tokens(prefill, load, kv, num_tokens)
    later = load._replace(latency_s=load.latency_s * factor)
    slower = load._replace(bytes_per_s=load.bytes_per_s / factor)
    assert meet_tokens(prefill, later, kv, num_tokens) >= meet * (1 - 1e-9)
    assert meet_tokens(prefill, slower, kv, num_tokens) >= meet * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(prefills, loads, kvs, queues)
def test_fetching_wins_just_behind_the_break_even_length_and_not_before(prefill, load, kv, queued):
    break_even = break_even_tokens(prefill, load, kv, queued_bytes=queued)

    def gain_s(num_tokens: float) -> float:
        return prefill.work_s(num_tokens) - load.load_s(kv * num_tokens, queued)

    if math.isinf(break_even):
        assert gain_s(1e12) <= 0
    else:
        scale = prefill.work_s(break_even * 1.01) + 1e-12
        assert gain_s(break_even * 1.01 + 1e-6) >= -1e-9 * scale
        assert gain_s(break_even * 0.99) <= 1e-9 * scale


def test_the_break_even_length_vanishes_with_the_latency_where_a_token_loads_faster_than_it_computes():
    prefill = llama_8b_on_h100()
    lengths = [break_even_tokens(prefill, LoadCost(latency_s, 11.5e9), KV) for latency_s in (1e-3, 1e-6, 1e-9, 0.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0.0


@settings(max_examples=60, deadline=None)
@given(prefills, kvs, tokens, st.floats(0, 0.1))
def test_at_the_least_bandwidth_loading_takes_as_long_as_computing(prefill, kv, num_tokens, latency_s):
    bandwidth = min_bandwidth(prefill, kv, num_tokens, latency_s=latency_s)
    if math.isinf(bandwidth):
        assert prefill.work_s(num_tokens) <= latency_s
    else:
        load = LoadCost(latency_s, bandwidth)
        assert load.load_s(kv * num_tokens) == pytest.approx(prefill.work_s(num_tokens), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(prefills, st.lists(st.floats(0, 1e5), min_size=2, max_size=8))
def test_work_adds_up_whatever_the_cuts(prefill, cuts):
    edges = [0.0, *np.cumsum(cuts)]
    parts = [prefill.work_s(end) - prefill.work_s(start) for start, end in itertools.pairwise(edges)]
    assert math.fsum(parts) == pytest.approx(prefill.work_s(edges[-1]), rel=1e-9, abs=1e-12)


def random_costs(rng: np.random.Generator) -> tuple[PrefillCost, LoadCost, float, int]:
    a, b = 10 ** rng.uniform(-7, -3), 10 ** rng.uniform(-12, -7)
    prefill = PrefillCost(0.0, a, b, window_b_s=b * rng.integers(0, 3), window_tokens=int(rng.integers(1, 8192)))
    load = LoadCost(10 ** rng.uniform(-4, 0), 10 ** rng.uniform(6, 12))
    return prefill, load, 10 ** rng.uniform(3, 6), int(rng.integers(16, 200_000))


def test_ten_thousand_random_requests():
    """Without overlap T(m) = lat + k m / B + C(n) - C(m) is concave on (0, N]: no m between beats both ends. From both ends
    it is never slower, and they meet where they have taken equally long. Fetching wins from the break-even length on."""
    rng = np.random.default_rng(20261)
    for _ in range(10_000):
        prefill, load, kv, length = random_costs(rng)

        def cut_s(m: float, prefill=prefill, load=load, kv=kv, length=length) -> float:
            return load.load_s(kv * m) + prefill.work_s(length) - prefill.work_s(m)

        ends = min(cut_s(0.0), cut_s(length))
        low, high = np.sort(rng.uniform(0, length, 2))
        assert cut_s((low + high) / 2) >= (cut_s(low) + cut_s(high)) / 2 - 1e-9 * ends, "not concave"
        assert min(cut_s(low), cut_s(high)) >= ends * (1 - 1e-12)
        meet = meet_tokens(prefill, load, kv, length)
        slower = load._replace(latency_s=load.latency_s * 1.1, bytes_per_s=load.bytes_per_s / 1.1)
        assert meet <= meet_tokens(prefill, slower, kv, length)
        assert hybrid_s(prefill, load, kv, length) <= ends * (1 + 1e-9)
        if meet < length:
            rest_s = load.load_s(kv * (length - meet))
            assert abs(prefill.work_s(meet) - rest_s) <= 1e-9 * ends
        break_even = break_even_tokens(prefill, load, kv)
        assert (length >= break_even) == (cut_s(length) <= cut_s(0.0)) or math.isclose(length, break_even, rel_tol=1e-6)


# A sliding window: two quadratics against an integral.


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("length", [50, 1024, 3000])
def test_the_work_of_windowed_layers_is_the_integral_of_its_tokens(window: int, length: int):
    prefill = PrefillCost(0.0, 3e-6, 2e-9, window_b_s=7e-9, window_tokens=window)
    middles = np.arange(length * 10) / 10 + 0.05

    integral = math.fsum(prefill.token_s(position) for position in middles) / 10

    assert prefill.work_s(length) == pytest.approx(integral, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(prefills, st.floats(0, 100), st.floats(-1e-2, 1e-2))
def test_how_far_one_gets_is_the_inverse_of_the_work(prefill, seconds, extra):
    reached = prefill.tokens_for(seconds, extra_token_s=extra)

    def spent_s(num_tokens: float) -> float:
        return prefill.work_s(num_tokens) + extra * num_tokens

    if math.isinf(reached):
        assert spent_s(1e12) <= seconds
    else:
        scale = prefill.work_s(reached) + abs(extra) * reached + seconds
        assert abs(spent_s(reached) - seconds) <= 1e-8 * scale + 1e-300


# Small things that must not be forgotten.


def test_every_chunk_pays_its_step():
    prefill = PrefillCost(0.01, 1e-4, 0.0)
    assert prefill.prefill_s(1000) == pytest.approx(0.11)
    assert prefill.prefill_s(1000, chunk_tokens=256) == pytest.approx(0.14)
    assert prefill.prefill_s(0, 500, chunk_tokens=256) == 0.0


def test_later_tokens_are_dearer():
    prefill = llama_8b_on_h100()
    assert prefill.prefill_s(512, 32768) > prefill.prefill_s(512)
    assert block_value(prefill, 32768, 16, 16 * KV) > block_value(prefill, 0, 16, 16 * KV)


def test_a_block_s_value_is_what_it_saves_for_each_of_its_bytes():
    prefill = PrefillCost(0.5, 1e-3, 0.0)
    assert block_value(prefill, 100, 16, 1 << 20, 0.25) == pytest.approx(16e-3 * 0.25 / (1 << 20))


def test_the_queue_ahead_is_part_of_a_load():
    load = LoadCost(0.002, 1e9)
    assert load.load_s(1e9, 2e9) == pytest.approx(3.002)
    assert load.load_s(0, 2e9) == 0.0


def test_a_tier_that_delivers_nothing_is_never_worth_it():
    prefill, dead = llama_8b_on_h100(), LoadCost(0.0, 0.0)
    assert math.isinf(dead.load_s(1))
    assert math.isinf(break_even_tokens(prefill, dead, KV))
    assert meet_tokens(prefill, dead, KV, 1000) == 1000
    assert full_overlap_tokens(prefill, dead, KV, 1000, 1100) == 1000


def test_tiers_work_side_by_side_unless_they_share_a_link():
    ram, drive = TierQuote(LoadCost(0.0, 10e9)), TierQuote(LoadCost(0.001, 1e9), queued_bytes=1e9)
    assert fetch_s([(ram, 1e9), (drive, 1e9)]) == pytest.approx(2.001)
    assert fetch_s([(ram, 1e9), (drive, 1e9)], shared_link=True) == pytest.approx(2.101)
    assert fetch_s([]) == 0.0


def test_a_load_that_hides_behind_the_suffix_costs_nothing():
    prefill, load = llama_8b_on_h100(), LoadCost(0.001, 50e9)
    assert full_overlap_tokens(prefill, load, KV, 1000, 50_000) == 0
    assert full_overlap_s(prefill, load, KV, 1000, 50_000) == pytest.approx(prefill.prefill_s(49_000, 1000))
