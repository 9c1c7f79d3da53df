"""What a prefill costs, for the sums that need it: by the efficiencies given, or as the tables expect it."""

from kvstore.calculator.prefill_shape import shape_of_row
from kvstore.calculator.priors import Setup, prior
from kvstore.cli.output import Work, as_term
from kvstore.cli.sums.amounts import refuse
from kvstore.cli.sums.inputs import GpuNumbers, ModelNumbers, need, need_shape
from kvstore.costs import PrefillCost


def prefill_cost(
    model: ModelNumbers,
    gpu: GpuNumbers,
    efficiency: tuple[float, float] | None,
    work: list[Work],
    *,
    otherwise: str = "",
) -> PrefillCost:
    """Its constants; how they came about goes to `work`. `otherwise` is one more option that would do, for the error."""
    return _from_efficiency(model, gpu, efficiency, work) if efficiency else _expected(model, gpu, work, otherwise)


def _from_efficiency(
    model: ModelNumbers, gpu: GpuNumbers, efficiency: tuple[float, float], work: list[Work]
) -> PrefillCost:
    shape = need_shape(model)
    peak = gpu.num_gpus * need(gpu.bf16_flops_per_s, "FLOP/s of a GPU", "--tflops", by_name="--gpu")
    linear, attention = efficiency
    cost = PrefillCost.from_flops(
        shape.prefill_params,
        shape.attn_flops_per_pair,
        peak,
        linear_efficiency=linear,
        attention_efficiency=attention,
        window_flops_per_pair=shape.window_flops_per_pair,
        window_tokens=int(shape.window_tokens),
    )
    g, p, pair = as_term(peak), as_term(shape.prefill_params), as_term(shape.attn_flops_per_pair)
    work.append(Work("a", "2 P / (G * efficiency of GEMMs)", f"2 * {p} / ({g} * {linear:g})", f"{as_term(cost.a_s)} s"))
    work.append(
        Work("b", "A / (G * efficiency of attention)", f"{pair} / ({g} * {attention:g})", f"{as_term(cost.b_s)} s")
    )
    return cost


def _expected(model: ModelNumbers, gpu: GpuNumbers, work: list[Work], otherwise: str) -> PrefillCost:
    """As the main command expects a prefill to cost: measured set-ups, or put together from their kind."""
    if model.row is None or gpu.row is None:
        ways = [
            *([otherwise] if otherwise else []),
            "--efficiency LINEAR,ATTENTION",
            "--model NAME and --gpu NAME of the tables",
        ]
        refuse(ways[0].split()[0], "absent", ", or ".join(ways))
    numbers = need_shape(model)
    shape = shape_of_row(model.row)._replace(
        prefill_params=numbers.prefill_params,
        attn_flops_per_pair=numbers.attn_flops_per_pair,
        window_flops_per_pair=numbers.window_flops_per_pair,
        window_tokens=int(numbers.window_tokens),
    )
    peak = need(gpu.bf16_flops_per_s, "FLOP/s of a GPU", "--tflops", by_name="--gpu")
    found = prior(Setup(shape, gpu.row._replace(bf16_flops_per_s=peak), gpu.num_gpus))
    work.append(
        Work("t0, a, b", found.source, "", f"{found.cost.t0_s:.6g}, {found.cost.a_s:.6g}, {found.cost.b_s:.6g} s")
    )
    return found.cost
