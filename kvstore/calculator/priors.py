"""What a prefill is expected to cost when nothing was measured, and how sure that is.

A set-up in the table of efficiencies is taken from there. Any other is put together from what bounds it, each part checked
against that table: GEMMs at the part of the peak that the GPU's FLOPs per byte of memory allow, all-reduces over the GPUs'
links, routing of experts through memory, and the floor of a step (its launches, and reading all weights once). An engine adds
a tenth to what its kernels take.
"""

from typing import NamedTuple

from kvstore.calculator.prefill_shape import PrefillShape
from kvstore.costs import PrefillCost
from kvstore.tables.rows import EfficiencyRow, GpuRow, efficiencies

ENGINE_OVERHEAD = 1.10
"""Measured TTFT over kernel time: 1.05 to 1.20."""

_ENGINE_T0_S = 0.005
"""Tokenising, scheduling, sampling: what a TTFT has beside kernels."""

_BASE, _PER_INTENSITY = 1.08, 0.0016
"""1 / efficiency of GEMMs against FLOPs per byte of the GPU: A100 1.22 at 153, H200 1.38 at 206, H100 1.42-1.59 at 295, L40S
1.79 at 419, and H20, poor in FLOPs, 1.15 at 37."""

_ATTENTION = {"A100": 0.556, "H100": 0.66, "H800": 0.66, "H200": 0.60, "L40S": 0.461, "B200": 0.538, "H20": 0.85}
_ATTENTION_ELSEWHERE = 0.56
"""Efficiency of attention, by the GPU's first word: medians of the table of efficiencies; H20 from published prefills at .84."""

_LINK_EFFICIENCY = 0.8
_NODE_GPUS, _NIC_BYTES_PER_S = 8, 50e9
"""More GPUs than a node has talk over one NIC each."""

_MOE_PASSES, _MOE_PASSES_TP, _MLA_MOE_PASSES_TP = 40, 90, 180
"""How often a layer's activations of a token pass memory for the sake of its experts (dispatch, small GEMMs, combine): 8 of
them on one GPU, cut up over several, and with MLA's projections beside them."""

_FLOOR_S_PER_LAYER, _FLOOR_CHUNK_TOKENS, _FLOOR_GPUS = 1e-3, 2048, 4
"""With four GPUs and more a chunk takes a millisecond a layer whatever is in it: Qwen3-8B on 8 H800 needs some 46 ms for each
2,048 tokens."""


class Prior(NamedTuple):
    """An expected cost. The sigmas are of the logarithms: 0.3 means "within a third, two times of three"."""

    cost: PrefillCost
    t0_sigma: float
    a_sigma: float
    b_sigma: float
    source: str  # for people
    floor_bound: bool = False  # t0 is a floor under the tokens' work rather than something on top of it


class Setup(NamedTuple):
    """Where a model runs."""

    shape: PrefillShape
    gpu: GpuRow
    num_gpus: int = 1
    fp8: bool = False  # weights and GEMMs

    @property
    def linear_flops_per_s(self) -> float:
        """Peak of the GEMMs."""
        return self.num_gpus * (self.gpu.fp8_flops_per_s if self.fp8 else self.gpu.bf16_flops_per_s)

    @property
    def attn_flops_per_s(self) -> float:
        """Peak of attention, which engines run in bf16."""
        return self.num_gpus * self.gpu.bf16_flops_per_s


def prior(setup: Setup) -> Prior:
    """The table's set-up, or one put together."""
    for row in efficiencies():
        fp8 = row.peak_flops_per_s > setup.gpu.bf16_flops_per_s * 1.01
        if (row.model, row.gpu, row.num_gpus, fp8) == (setup.shape.name, setup.gpu.name, setup.num_gpus, setup.fp8):
            return _tabled(setup, row)
    return _composed(setup)


def from_efficiencies(setup: Setup, linear: float, attention: float) -> PrefillCost:
    """a and b of given efficiencies alone: no t0 and no overhead."""
    return _cost(setup, a_s=2 * setup.shape.prefill_params / (setup.linear_flops_per_s * linear), attention=attention)


def kernel_cost(setup: Setup, row: EfficiencyRow) -> PrefillCost:
    """A row of the table, kernels alone. Its efficiencies are parts of one peak, its own."""
    peak = row.peak_flops_per_s * row.num_gpus
    bf16_attention = row.attention * peak / setup.attn_flops_per_s
    a_s = 2 * setup.shape.prefill_params / (peak * row.linear)
    return _cost(setup, a_s=a_s, attention=bf16_attention)._replace(t0_s=row.t0_s)


def scaled(cost: PrefillCost, *, linear: float, attention: float, t0_s: float) -> PrefillCost:
    """Another cost of the same form."""
    return cost._replace(
        t0_s=t0_s, a_s=cost.a_s * linear, b_s=cost.b_s * attention, window_b_s=cost.window_b_s * attention
    )


def _tabled(setup: Setup, row: EfficiencyRow) -> Prior:
    kernels = kernel_cost(setup, row)
    t0_s = row.t0_s * ENGINE_OVERHEAD + _ENGINE_T0_S + _step_floor_s(setup) / 2
    cost = scaled(kernels, linear=ENGINE_OVERHEAD, attention=ENGINE_OVERHEAD, t0_s=t0_s)
    source = f"efficiencies measured for {row.model} on {row.num_gpus} x {row.gpu} (kernels), x {ENGINE_OVERHEAD} for the engine"
    return Prior(cost, *_sigmas(setup, tabled=True), source)


def _composed(setup: Setup) -> Prior:
    gemm_s = 2 * setup.shape.prefill_params / (setup.linear_flops_per_s * gemm_efficiency(setup))
    a_s = (gemm_s + all_reduce_s(setup) + expert_s(setup)) * ENGINE_OVERHEAD
    floor_s = _step_floor_s(setup)
    floor_bound = setup.shape.is_dense and a_s * _FLOOR_CHUNK_TOKENS < floor_s
    cost = _cost(
        setup,
        a_s=max(a_s, floor_s / _FLOOR_CHUNK_TOKENS),
        attention=attention_efficiency(setup.gpu) / ENGINE_OVERHEAD,
    )
    t0_s = floor_s + _ENGINE_T0_S if floor_bound else _t0_s(setup)
    source = "no such set-up measured: from its class (GEMMs, all-reduces, experts, floor of a step)"
    return Prior(cost._replace(t0_s=t0_s), *_sigmas(setup, tabled=False), source, floor_bound)


def gemm_efficiency(setup: Setup) -> float:
    """Part of the peak: the more FLOPs a GPU has for a byte, the less of them it can use."""
    intensity = setup.gpu.bf16_flops_per_s / setup.gpu.mem_bytes_per_s
    return 1 / (_BASE + _PER_INTENSITY * intensity)


def attention_efficiency(gpu: GpuRow) -> float:
    """Part of the bf16 peak."""
    return _ATTENTION.get(gpu.name.split()[0].partition("-")[0], _ATTENTION_ELSEWHERE)


def all_reduce_s(setup: Setup) -> float:
    """Of a token: two a layer, each moves 2 (n-1)/n of the activations in bf16 over the GPU's link."""
    shape, num_gpus = setup.shape, setup.num_gpus
    if num_gpus == 1:
        return 0.0
    link = (setup.gpu.gpu_link_bytes_per_s or setup.gpu.host_link_bytes_per_s / 2) * _LINK_EFFICIENCY
    nbytes = 2 * shape.layers * shape.hidden * 2 * 2.0
    inside = min(num_gpus, _NODE_GPUS)
    seconds = nbytes * (inside - 1) / inside / link
    if num_gpus > _NODE_GPUS:
        seconds += nbytes / _NODE_GPUS / (_NIC_BYTES_PER_S * _LINK_EFFICIENCY)
    return seconds


def expert_s(setup: Setup) -> float:
    """Of a token: what experts cost beside their FLOPs."""
    shape = setup.shape
    if not shape.is_moe:
        return 0.0
    passes = _MOE_PASSES
    if setup.num_gpus > 1:
        passes = _MLA_MOE_PASSES_TP if shape.is_mla else _MOE_PASSES_TP
    return passes * shape.layers * shape.hidden * 2 / setup.gpu.mem_bytes_per_s


def _t0_s(setup: Setup) -> float:
    weight_bytes = setup.shape.total_params * (1 if setup.fp8 else 2)
    read_s = weight_bytes / (setup.num_gpus * setup.gpu.mem_bytes_per_s)
    kernels_s = (2.0 if setup.shape.is_moe else 0.5) * read_s  # dense weights are read beside the computing
    return kernels_s * ENGINE_OVERHEAD + _ENGINE_T0_S + _step_floor_s(setup) / 2


def _step_floor_s(setup: Setup) -> float:
    return _FLOOR_S_PER_LAYER * setup.shape.layers if setup.num_gpus >= _FLOOR_GPUS else 0.0


def _sigmas(setup: Setup, *, tabled: bool) -> tuple[float, float, float]:
    """Of t0, a, b. Attention is nearly all FLOPs and so known best; experts and many GPUs are known least."""
    if (
        setup.shape.is_mla
    ):  # its prefill may run in the absorbed form, which has 3.4 times the FLOPs of the expanded one
        return 0.8, 1.0, 0.6
    if setup.shape.is_moe:
        return 0.8, 0.6, 0.25
    if setup.num_gpus >= _FLOOR_GPUS:
        return 0.8, 0.4, 0.25
    return (0.8, 0.2, 0.15) if tabled else (0.8, 0.3, 0.2)


def _cost(setup: Setup, *, a_s: float, attention: float) -> PrefillCost:
    shape, flops = setup.shape, setup.attn_flops_per_s * attention
    return PrefillCost(
        t0_s=0.0,
        a_s=a_s,
        b_s=shape.attn_flops_per_pair / flops,
        window_b_s=shape.window_flops_per_pair / flops,
        window_tokens=shape.window_tokens,
    )
