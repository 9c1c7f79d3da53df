"""`kvstore break-even`: what a cached prefix is worth, and the sums that people do beside it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvstore.calculator.break_even import DEFAULT_STORAGE, MONTH_S, Storage
from kvstore.calculator.case import Case, Numbers, make_gpu, make_model, make_prefill, make_tiers, parse_points
from kvstore.calculator.plots import check_plot, plot_lines
from kvstore.calculator.priors import Setup
from kvstore.calculator.tier import Tier, parse_tier
from kvstore.cli.break_even_more import COMMANDS
from kvstore.cli.break_even_report import make_report, plot_series
from kvstore.cli.finite import NOT_NEGATIVE, POSITIVE
from kvstore.cli.output import Form, output_options, write
from kvstore.core.errors import ConfigError
from kvstore.tables import rows

_COUNT = click.IntRange(min=1)
_LONGEST = 1_000_000_000  # tokens
_DEFAULT_HIT_RATES = (0.5, 0.9, 1.0)


@click.group("break-even", invoke_without_command=True, subcommand_metavar="[COMMAND [ARGS]...]")
@click.option("--model", metavar="NAME", help="As in the table, for example Llama-3.1-8B.")
@click.option("--config", type=click.Path(path_type=Path), help="The model's config.json, or the folder that has it.")
@click.option("--gpu", metavar="NAME", help="As in the table, for example H100.")
@click.option("--num-gpus", type=_COUNT, default=1, show_default=True, help="Of one replica.")
@click.option("--context", type=click.IntRange(2, _LONGEST), metavar="TOKENS", help="Length of the cached prefix.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME=GB/s,ms[,queued GB]",
    help="Or hardware of the table by name. Repeatable.",
)
@click.option(
    "--transfer-kib", type=POSITIVE, help="Size of one copy from host memory: small ones are slow.  [default: large]"
)
@click.option("--efficiency", metavar="LINEAR,ATTENTION", help="Parts of the GPUs' peak; no t0, no overhead then.")
@click.option("--measured", metavar="n:ms,n:ms", help="Prefills measured: tokens, milliseconds.")
@click.option(
    "--measured-load", metavar="n:ms,n:ms", help="Loads measured; n/prompt:ms: TTFT of a prompt of which n were loaded."
)
@click.option("--measure", is_flag=True, help="Measure this machine: copies, a sidecar's speeds, the included engine.")
@click.option("--socket", metavar="PATH", help="With --measure: the sidecar's socket.  [default: none is asked]")
@click.option(
    "--engine-model", metavar="PATH", help="With --measure: the model to run.  [default: as for kvstore engine]"
)
@click.option("--hit-rate", metavar="PART[,PART]...", help="TTFT if so much is found.  [default: 0.5,0.9,1]")
@click.option(
    "--storage",
    multiple=True,
    metavar="NAME=USD",
    help="Price of a GB-month. Repeatable.  [default: cloud list prices]",
)
@click.option("--gpu-usd-per-h", type=NOT_NEGATIVE, help="Price of one GPU.  [default: from the table]")
@click.option("--kv-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option(
    "--kv-copies", type=POSITIVE, default=1.0, help="If ranks store the same KV more than once.  [default: 1]"
)
@click.option(
    "--precision", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True, help="Of the weights."
)
@click.option("--layers", type=_COUNT, help="Numbers instead of a name, or beside one:")
@click.option("--hidden", type=_COUNT)
@click.option("--heads", type=_COUNT)
@click.option("--kv-heads", type=_COUNT)
@click.option("--head-dim", type=_COUNT)
@click.option("--kv-bytes-per-token", type=POSITIVE)
@click.option("--prefill-params-b", type=POSITIVE, help="Billions that a token passes, without embedding and LM head.")
@click.option("--attn-flops-per-pair", type=POSITIVE, help="4 x layers x heads x head_dim.")
@click.option("--tflops", type=POSITIVE, help="Dense peak of one GPU.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="TTFT against length, as .png or .html.")
@output_options
@click.pass_context
def break_even(ctx: click.Context, /, *, form: Form, plot: Path | None, **options: Any) -> None:
    """From which length on is it faster to fetch a cached prefix than to compute it?

    By names (--model, --gpu), by a config.json, by numbers, or measured. Numbers that JSON has no word for, as a length that
    never comes, are null there.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    if plot is not None:
        check_plot(plot)
    case = make_case(**options)
    hit_rates = _parts(options["hit_rate"], "--hit-rate") if options["hit_rate"] else _DEFAULT_HIT_RATES
    storage = [_storage(text) for text in options["storage"]] or DEFAULT_STORAGE
    write(make_report(case, hit_rates, storage), form)
    if plot is not None:
        plot_lines(
            plot,
            plot_series(case),
            title=f"{case.model.shape.name}: seconds to the first token against the length of the prefix",
            x_label="tokens of the prefix",
            y_label="seconds",
            log_x=True,
            log_y=True,
        )


for _command in COMMANDS:
    break_even.add_command(_command)


def make_case(*, measure: bool, context: int | None, **options: Any) -> Case:
    """The question that the options ask. Raises ConfigError."""
    if options["model"] is None and options["config"] is None and not measure and not _has_numbers(options):
        raise ConfigError(
            "--model: missing: give --model NAME, --config FILE, or numbers (--kv-bytes-per-token ...); "
            f"known models: {', '.join(rows.models())}",
            field="--model",
            value="",
        )
    if context is None:
        raise ConfigError(
            "--context: missing: the length of the prefix in tokens, for example 32768", field="--context", value=""
        )
    if measure:
        return _measured_case(context, options)
    numbers = _numbers(options)
    model = make_model(
        name=options["model"],
        config=options["config"],
        numbers=numbers,
        fp8_kv=options["kv_dtype"] == "fp8",
        kv_copies=options["kv_copies"],
    )
    gpu = make_gpu(options["gpu"], numbers.flops_per_s)
    num_gpus = options["num_gpus"]
    fp8 = options["precision"] == "fp8"
    if fp8 and gpu is not None and not gpu.fp8_flops_per_s:
        raise ConfigError(f"--precision: fp8; {gpu.name} has none: use bf16", field="--precision", value="fp8")
    setup = None if gpu is None else Setup(model.shape, gpu, num_gpus, fp8)
    efficiency = _efficiency(options["efficiency"])
    points = parse_points(options["measured"], "--measured")
    fitted, expected, source = make_prefill(model, setup, efficiency, points)
    load_points = parse_points(options["measured_load"], "--measured-load", loads=True)
    given = [parse_tier(text, gpu or rows.gpu("H100"), num_gpus) for text in options["tiers"]]
    transfer_bytes = (options["transfer_kib"] or 0.0) * 1024
    tiers = make_tiers(
        given,
        load_points,
        fitted=fitted,
        kv_bytes_per_token=model.shape.kv_bytes_per_token,
        gpu=gpu,
        num_gpus=num_gpus,
        transfer_bytes=transfer_bytes,
    )
    usd_per_h = options["gpu_usd_per_h"]
    if usd_per_h is None:
        usd_per_h = 0.0 if gpu is None else gpu.usd_per_h
    return Case(
        model=model,
        setup=setup,
        fitted=fitted,
        expected=expected,
        prefill_source=source,
        tiers=tiers,
        num_tokens=context,
        gpus_usd_per_s=usd_per_h * num_gpus / 3600,
        efficiency=efficiency,
        points=points,
        load_points=load_points,
        warnings=[*model.shape.warnings, *_copies_warning(model.shape.kv_heads, model.shape.is_mla, options)],
    )


def _measured_case(context: int, options: dict[str, Any]) -> Case:
    for field in ("gpu", "tflops", "efficiency", "measured", "measured_load", "config"):
        if options[field] is not None:
            option = f"--{field.replace('_', '-')}"
            raise ConfigError(f"{option}: given with --measure, which measures it; leave one out", field=option)
    from kvstore.cli.break_even_measure import measure

    found = measure(socket=options["socket"], engine_model=options["engine_model"])
    numbers = _numbers(options)
    model = make_model(name=options["model"], config=None, numbers=numbers) if options["model"] else found.model
    fitted, expected, source = make_prefill(model, None, None, found.points)
    here: list[Tier] = [parse_tier(text, rows.gpu("H100"), 1) for text in options["tiers"]] or found.tiers
    return Case(
        model=model,
        setup=None,
        fitted=fitted,
        expected=expected,
        prefill_source=f"{source} of the included engine on this machine",
        tiers=here,
        num_tokens=context,
        gpus_usd_per_s=(options["gpu_usd_per_h"] or 0.0) / 3600,
        points=found.points,
        warnings=found.notes,
    )


def _numbers(options: dict[str, Any]) -> Numbers:
    return Numbers(
        layers=options["layers"] or 0,
        hidden=options["hidden"] or 0,
        heads=options["heads"] or 0,
        kv_heads=options["kv_heads"] or 0,
        head_dim=options["head_dim"] or 0,
        kv_bytes_per_token=options["kv_bytes_per_token"] or 0.0,
        prefill_params=(options["prefill_params_b"] or 0.0) * 1e9,
        attn_flops_per_pair=options["attn_flops_per_pair"] or 0.0,
        flops_per_s=(options["tflops"] or 0.0) * 1e12,
    )


def _has_numbers(options: dict[str, Any]) -> bool:
    return any(options[name] for name in ("layers", "kv_heads", "head_dim", "kv_bytes_per_token"))


def _efficiency(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    found = _parts(text, "--efficiency")
    if len(found) != 2:
        raise ConfigError(
            f"--efficiency: {text!r}; use LINEAR,ATTENTION, for example 0.637,0.566", field="--efficiency", value=text
        )
    return found[0], found[1]


def _parts(text: str, field: str) -> tuple[float, ...]:
    """Numbers above 0, at most 1."""
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 < value <= 1:
            raise ConfigError(f"{field}: {part.strip()!r}; use numbers above 0, at most 1", field=field, value=part)
        found.append(value)
    return tuple(found)


def _storage(text: str) -> Storage:
    name, _, price = text.partition("=")
    try:
        usd = float(price)
    except ValueError:
        usd = math.nan
    if not name.strip() or not 0 < usd < 1e6:
        raise ConfigError(
            f"--storage: {text!r}; use NAME=USD of a GB-month, for example s3=0.023", field="--storage", value=text
        )
    return Storage(name.strip(), usd / 1e9 / MONTH_S)


def _copies_warning(kv_heads: int, is_mla: bool, options: dict[str, Any]) -> Sequence[str]:  # noqa: FBT001 - a fact of the model
    copies = options["num_gpus"] / kv_heads if kv_heads else 0
    if copies <= 1 or options["kv_copies"] != 1.0:
        return ()
    why = "MLA's latent is the same on every rank" if is_mla else f"{kv_heads} KV heads on {options['num_gpus']} GPUs"
    return [
        f"{why}: an engine whose ranks each move their own moves {copies:g} times the bytes; --kv-copies {copies:g}"
    ]


def _refuse_options(ctx: click.Context) -> None:
    """Options before a subcommand would be lost."""
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        option = f"--{given[0].removeprefix('as_').replace('_', '-')}"
        raise ConfigError(f"{option}: belongs behind {ctx.invoked_subcommand}, not before it", field=option, value="")
