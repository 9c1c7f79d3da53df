"""The sums beside break-even: published figures, and what must hold whatever the numbers are."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.calculator.flops import ModelShape
from kvstore.calculator.prefill_split import hiding_bandwidth, transfer
from kvstore.calculator.quantisation import KvFormat, capacity, kv_memory_bytes
from kvstore.calculator.roofline import Machine, Storage, compute_bound_batch, decode, prefill
from kvstore.calculator.speculative import best_speculation, speculate, tokens_per_step
from kvstore.calculator.token_cost import usd_for, usd_per_million
from kvstore.calculator.utilisation import utilisation
from kvstore.costs import LoadCost
from kvstore.tables.rows import gpu, model, models

GIB = 1 << 30
H100 = Machine(989e12, 3.35e12)
positive = st.floats(1e-3, 1e6)
shares = st.floats(0, 1)


# The figures everybody quotes.


def test_the_kv_of_8k_tokens_and_its_way_over_400_gigabits() -> None:
    kv_bytes = model("Llama-3.1-8B").kv_bytes_per_token * 8192

    found = transfer(LoadCost(0.0, 50e9), kv_bytes, 0.2, 32, 1.0)

    assert kv_bytes == 1073741824
    assert found.whole_s == pytest.approx(0.02147483648)


@pytest.mark.parametrize(("bits", "tokens", "requests"), [(16, 327_680, 40), (8, 655_360, 80), (4, 1_310_720, 160)])
def test_tokens_and_requests_in_40_gib(bits: int, tokens: int, requests: int) -> None:
    per_token = KvFormat("", bits).bytes_per_token(131_072 / 2)

    fits = capacity(40 * GIB, per_token, block_tokens=16, request_tokens=8192)

    assert (fits.num_tokens, fits.num_requests) == (tokens, requests)


def test_kv_of_a_batch_of_32_on_llama_2_13b() -> None:
    assert model("Llama-2-13B").kv_bytes_per_token * 32 * 2048 == 53_687_091_200


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.8, 3.3616), (0.5, 1.9375)])
def test_expected_tokens_of_a_speculative_step(acceptance: float, tokens: float) -> None:
    assert tokens_per_step(acceptance, 4) == pytest.approx(tokens)


def test_dollars_of_tokens_and_of_requests() -> None:
    assert usd_per_million(2, 100) == pytest.approx(5.555555555555556)
    assert usd_for(1000 * 200, 2, 100) == pytest.approx(1.1111111111111112)
    assert usd_for(1000, 2, 100 / 60) == pytest.approx(0.3333333333333333)


def test_scales_of_a_block_and_head() -> None:
    """One of 4 bytes for 16 tokens x 128 elements, for 32 layers, 8 heads, K and V."""
    kept = KvFormat("int8", 8, scale_bytes=4, scaled_elements=16 * 128)

    assert kept.scale_bytes_per_token(65_536) == 32 * 8 * 2 * 4 / 16
    assert kept.bytes_per_token(65_536) == 65_536 + 128


def test_a_mean_of_1_in_64_elements_makes_int4_a_half_bit_dearer() -> None:
    """As GPTQ-like groups do: 64 elements of 4 bits share 4 bytes."""
    assert KvFormat("int4", 4, 4, 64).bytes_per_token(1000) == pytest.approx(1000 * 4.5 / 8)


def test_what_gpus_leave_for_kv() -> None:
    assert kv_memory_bytes(80e9, 2, 141e9, share=0.9) == pytest.approx(3e9)
    assert kv_memory_bytes(80e9, 1, 141e9) == 0.0
    assert kv_memory_bytes(80e9, 8, 16e9, share=1.0, replicas=2.0) == pytest.approx((640e9 - 16e9) / 2)


def test_ridge_points() -> None:
    assert H100.ridge_flops_per_byte == pytest.approx(295.22, rel=1e-4)
    a100 = gpu("A100")
    assert Machine(a100.bf16_flops_per_s, a100.mem_bytes_per_s).ridge_flops_per_byte == pytest.approx(153.0, rel=1e-3)


def test_decode_of_one_sequence_is_bound_by_reading_the_weights() -> None:
    shape = ModelShape.from_row(model("Llama-3.1-8B"))

    found = decode(shape, Storage(), 1, 1)

    assert found.bound(H100) == "memory"
    assert found.tokens_per_s(H100) == pytest.approx(3.35e12 / (8.03e9 * 2), rel=1e-4)


def test_prefill_is_bound_by_arithmetic_and_causal() -> None:
    """2 P n + A n^2/2 with A = 4 L H dh."""
    found = prefill(ModelShape.from_row(model("Llama-3.1-8B")), Storage(), 1, 8192)

    assert found.bound(H100) == "compute"
    assert found.flops == pytest.approx(2 * 6.979e9 * 8192 + 4 * 32 * 32 * 128 * 8192**2 / 2)


def test_mfu_of_a_prefill_at_the_roof_is_one() -> None:
    shape = ModelShape.from_row(model("Llama-3.1-70B"))
    step = prefill(shape, Storage(), 1, 4096)

    found = utilisation(step, H100, step.tokens_per_s(H100))

    assert found.mfu == pytest.approx(1.0)
    assert found.mbu < 1


def test_experts_are_read_as_tokens_call_for_them() -> None:
    shape = ModelShape.from_row(model("Qwen3-30B-A3B"))

    one, many = shape.weights_read_bytes(1, 2.0), shape.weights_read_bytes(1000, 2.0)

    assert one == pytest.approx(3.35e9 * 2)
    assert many == pytest.approx(30.53e9 * 2, rel=1e-6)


def test_a_window_bounds_what_a_late_token_looks_at() -> None:
    shape = ModelShape.from_row(model("gpt-oss-120b"))

    assert shape.kv_read_bytes(100) == shape.kv_bytes_per_token * 100
    assert shape.kv_read_bytes(10_000) == pytest.approx(shape.kv_bytes_per_token * (10_000 + 128) / 2)
    assert shape.decode_flops(10_000) == 2 * shape.active_params + 294_912 * 10_000 + 294_912 * 128


def test_every_model_of_the_table_has_a_shape() -> None:
    for row in models().values():
        shape = ModelShape.from_row(row)
        assert 0 < shape.prefill_params <= shape.active_params <= shape.total_params, row.name
        assert shape.prefill_flops(1000) > 0, row.name


# Properties.


@settings(deadline=None)
@given(shares, st.integers(0, 40))
def test_a_step_yields_between_one_token_and_all_of_them(acceptance: float, k: int) -> None:
    found = tokens_per_step(acceptance, k)

    assert 1 <= found <= k + 1
    if acceptance < 0.999:
        assert found == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance), rel=1e-9)


@settings(deadline=None)
@given(shares, st.floats(0, 3), st.floats(0, 1), st.integers(1, 30))
def test_the_best_draft_is_the_best_of_all_and_never_worse_than_none(
    acceptance: float, draft_cost: float, check_cost: float, limit: int
) -> None:
    best = best_speculation(acceptance, draft_cost, check_cost, max_draft_tokens=limit)

    others = [speculate(acceptance, k, draft_cost, check_cost).speed_up for k in range(limit + 1)]
    assert best.speed_up == max(others)
    assert best.speed_up >= 1
    assert best.draft_tokens == others.index(max(others))


@settings(deadline=None)
@given(positive, st.floats(1, 1e9), st.floats(1e-3, 1e3), st.integers(1, 128))
def test_a_transfer_by_layers_is_simulated_right(
    bytes_per_s: float, nbytes: float, prefill_s: float, layers: int
) -> None:
    """Against the sending of one layer after the other."""
    found = transfer(LoadCost(0.001, bytes_per_s), nbytes, prefill_s, layers, 1.0)

    link_free_s = 0.0
    for layer in range(1, layers + 1):
        link_free_s = max(link_free_s, prefill_s * layer / layers) + nbytes / layers / bytes_per_s
    assert found.exposed_s == pytest.approx(0.001 + link_free_s - prefill_s, rel=1e-6, abs=1e-9 * (1 + prefill_s))
    assert found.exposed_s <= found.whole_s * (1 + 1e-9)


@settings(deadline=None)
@given(st.floats(1e3, 1e12), st.floats(1e-3, 1e3), st.integers(2, 128), st.floats(1.01, 100))
def test_the_hiding_bandwidth_is_where_it_begins_to_hide(
    nbytes: float, prefill_s: float, layers: int, factor: float
) -> None:
    least = hiding_bandwidth(nbytes, prefill_s)

    assert transfer(LoadCost(0, least * factor), nbytes, prefill_s, layers, 1.0).hides
    assert not transfer(LoadCost(0, least / factor), nbytes, prefill_s, layers, 1.0).hides
    at_full_rate = transfer(LoadCost(0, least), nbytes, prefill_s, layers, 1 / prefill_s)
    assert at_full_rate.link_share == pytest.approx(1.0)


@settings(deadline=None)
@given(st.floats(1e6, 1e13), st.floats(1, 1e7), st.integers(1, 512), st.integers(1, 1_000_000))
def test_what_is_said_to_fit_fits_and_one_more_block_does_not(
    memory: float, per_token: float, block_tokens: int, request_tokens: int
) -> None:
    fits = capacity(memory, per_token, block_tokens=block_tokens, request_tokens=request_tokens)

    assert fits.num_tokens * per_token <= memory * (1 + 1e-9)
    assert (fits.num_tokens + block_tokens) * per_token > memory * (1 - 1e-9)
    assert fits.num_requests * request_tokens <= fits.num_tokens
    assert fits.num_tokens == fits.num_blocks * block_tokens


@settings(deadline=None)
@given(st.integers(1, 1000), st.floats(1, 200_000), st.sampled_from(sorted(models())))
def test_no_phase_beats_either_roof(batch: int, num_tokens: float, name: str) -> None:
    shape = ModelShape.from_row(model(name))

    for phase in (prefill(shape, Storage(), batch, num_tokens), decode(shape, Storage(), batch, num_tokens)):
        attained = phase.flops / phase.seconds(H100)
        assert attained <= H100.flops_per_s * (1 + 1e-9)
        assert attained == pytest.approx(min(H100.flops_per_s, phase.intensity * H100.bytes_per_s), rel=1e-9)
        assert max(utilisation(phase, H100, phase.tokens_per_s(H100))[:2]) == pytest.approx(1.0)


@settings(deadline=None)
@given(st.floats(1, 4000))
def test_decode_crosses_the_ridge_at_the_batch_that_is_said(num_tokens: float) -> None:
    shape, machine = ModelShape.from_row(model("Llama-3.1-8B")), H100

    batch = compute_bound_batch(shape, Storage(), machine, num_tokens)

    if math.isfinite(batch):
        at = decode(shape, Storage(), batch, num_tokens)
        assert at.intensity == pytest.approx(machine.ridge_flops_per_byte, rel=1e-6)
    else:
        assert decode(shape, Storage(), 1e9, num_tokens).bound(machine) == "memory"


def test_long_contexts_are_bound_by_memory_at_any_batch() -> None:
    shape = ModelShape.from_row(model("Llama-3.1-8B"))

    assert math.isfinite(compute_bound_batch(shape, Storage(), H100, 100))
    assert compute_bound_batch(shape, Storage(), H100, 8192) == math.inf
