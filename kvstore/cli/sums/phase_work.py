"""The working of a prefill or a decode step: its FLOP and its bytes."""

from typing import NamedTuple

from kvstore.calculator.flops import ModelShape
from kvstore.calculator.roofline import Phase, Storage, decode, prefill
from kvstore.cli.output import Work, as_term


class Step(NamedTuple):
    """A prefill of `batch` prompts of `num_tokens`, or one token for each of `batch` sequences behind so many."""

    phase: str  # prefill, decode
    batch: int
    num_tokens: int

    def of(self, shape: ModelShape, storage: Storage) -> Phase:
        """What it calculates and moves."""
        return (prefill if self.phase == "prefill" else decode)(shape, storage, self.batch, self.num_tokens)


def phase_work(step: Step, shape: ModelShape, storage: Storage, label: str = "") -> list[Work]:
    """Lines whose names begin with `label`."""
    found = step.of(shape, storage)
    formula, values = (_prefill_flops if step.phase == "prefill" else _decode_flops)(step, shape)
    return [
        Work(f"{label}FLOP", formula, values, as_term(found.flops)),
        _weights_work(shape, storage, found, label),
        _kv_work(step, shape, storage, found, label),
        Work(
            f"{label}intensity",
            "FLOP / (weight bytes + KV bytes)",
            f"{as_term(found.flops)} / ({as_term(found.weight_bytes)} + {as_term(found.kv_bytes)})",
            f"{as_term(found.intensity)} FLOP/B",
        ),
    ]


def _prefill_flops(step: Step, shape: ModelShape) -> tuple[str, str]:
    n, pair, seen = step.num_tokens, as_term(shape.attn_flops_per_pair), min(step.num_tokens, shape.window_tokens)
    formula, values = "2 P n + A n^2/2", f"2 * {as_term(shape.prefill_params)} * {n} + {pair} * {n}^2/2"
    if shape.window_flops_per_pair:
        formula += " + A_w m (n - m/2)"
        values += f" + {as_term(shape.window_flops_per_pair)} * {seen:g} * ({n} - {seen:g}/2)"
    tail = ", m = min(n, window)" if shape.window_flops_per_pair else ""
    return f"batch * ({formula}){tail}", f"{step.batch} * ({values})"


def _decode_flops(step: Step, shape: ModelShape) -> tuple[str, str]:
    n, pair, seen = step.num_tokens, as_term(shape.attn_flops_per_pair), min(step.num_tokens, shape.window_tokens)
    formula, values = "2 P + A n", f"2 * {as_term(shape.active_params)} + {pair} * {n}"
    if shape.window_flops_per_pair:
        formula += " + A_w min(n, window)"
        values += f" + {as_term(shape.window_flops_per_pair)} * {seen:g}"
    return f"batch * ({formula})", f"{step.batch} * ({values})"


def _kv_work(step: Step, shape: ModelShape, storage: Storage, found: Phase, label: str) -> Work:
    n, of_token = step.num_tokens, as_term(shape.kv_bytes_per_token * storage.kv_share)
    result = f"{as_term(found.kv_bytes)} B"
    if step.phase == "prefill":
        return Work(f"{label}KV bytes", "batch * n * K, written", f"{step.batch} * {n} * {of_token}", result)
    if not shape.window_flops_per_pair:
        return Work(f"{label}KV bytes", "batch * n * K, read", f"{step.batch} * {n} * {of_token}", result)
    share = shape.window_flops_per_pair / (shape.attn_flops_per_pair + shape.window_flops_per_pair)
    formula = "batch * ((1 - s) n + s min(n, window)) * K, read; s: share of KV in layers with a window"
    seen = f"{1 - share:.6g} * {n} + {share:.6g} * {min(n, shape.window_tokens):g}"
    return Work(f"{label}KV bytes", formula, f"{step.batch} * ({seen}) * {of_token}", result)


def _weights_work(shape: ModelShape, storage: Storage, found: Phase, label: str) -> Work:
    total, size = as_term(shape.total_params), f"{storage.bytes_per_param:g}"
    result = f"{as_term(found.weight_bytes)} B"
    if shape.active_params >= shape.total_params:
        return Work(f"{label}weight bytes", "parameters * bytes of one", f"{total} * {size}", result)
    share = as_term(shape.active_params / shape.total_params)
    formula = "parameters * (1 - (1 - active/all)^tokens) * bytes of one: experts that some token calls for"
    return Work(
        f"{label}weight bytes", formula, f"{total} * (1 - (1 - {share})^{as_term(found.num_tokens)}) * {size}", result
    )
