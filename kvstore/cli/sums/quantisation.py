"""`kvstore break-even quantisation`: how much more KV fits into a memory when an element has fewer bits."""

from typing import Any, NamedTuple

import click

from kvstore.calculator.quantisation import BITS, KvFormat, capacity, kv_memory_bytes
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Work,
    as_bytes,
    as_count,
    as_number,
    as_percent,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import COUNT, NOT_NEGATIVE, POSITIVE_SHARE, refuse, size
from kvstore.cli.sums.inputs import GpuNumbers, ModelNumbers, gpu_options, model_options, need

_SCALES = ("block", "token", "group", "none")
_COLUMNS = (
    Column("format", "KV format"),
    Column("bits", "", as_number),
    Column("bytes_per_token", "B per token", as_count),
    Column("scale_bytes_per_token", "scales B", as_number),
    Column("scale_share", "scales", as_percent),
    Column("tokens", "tokens", as_count),
    Column("requests", "requests", as_count),
    Column("times", "x bf16", as_number),
    Column("more_tokens", ""),
    Column("more_requests", ""),
)


_USUAL_HEAD = 128


class _Room(NamedTuple):
    elements: float  # of KV per token
    memory_bytes: float
    block_tokens: int
    request_tokens: int


@click.command(short_help="What fits if KV has fewer bits.")
@model_options
@gpu_options
@click.option("--memory", "memory_bytes", type=size, help="For KV.  [default: what the GPUs have beside the weights]")
@click.option("--context", "request_tokens", type=COUNT, default=8192, show_default=True, help="Tokens of a request.")
@click.option("--block-tokens", type=COUNT, default=16, show_default=True)
@click.option(
    "--scales",
    type=click.Choice(_SCALES),
    default="block",
    show_default=True,
    help="What one scale is for, of a head's K or V: a block, a token, --group-elements, or so much that none counts.",
)
@click.option("--scale-bytes", type=NOT_NEGATIVE, default=4.0, show_default=True, help="With its zero point, if any.")
@click.option("--group-elements", type=COUNT, default=64, show_default=True)
@click.option(
    "--memory-share", type=POSITIVE_SHARE, default=0.9, show_default=True, help="Of the GPUs' memory, what is used."
)
@click.option("--weight-bits", type=click.IntRange(min=1, max=32), default=16, show_default=True)
@output_options
def quantisation(
    *,
    model: ModelNumbers,
    gpu: GpuNumbers,
    memory_bytes: float | None,
    request_tokens: int,
    block_tokens: int,
    scales: str,
    scale_bytes: float,
    group_elements: int,
    memory_share: float,
    weight_bits: int,
    form: Form,
) -> None:
    """How many more tokens and requests fit into a memory if KV is kept in fewer bits.

    \b
    Example:
      kvstore break-even quantisation --model Llama-3.1-8B --memory 40GiB
    """
    kv_bytes = need(model.kv_bytes_per_token, "KV of a token", "--kv-bytes-per-token", by_name="--model")
    work = [Work("elements per token", "KV bytes in bf16 / 2", f"{as_term(kv_bytes)} / 2", as_term(kv_bytes / 2))]
    if memory_bytes is None:
        memory_bytes = _beside_weights(model, gpu, memory_share, weight_bits, work)
    scaled = _scaled_elements(model, scales, block_tokens, group_elements)
    room = _Room(kv_bytes / 2, memory_bytes, block_tokens, request_tokens)
    rows: list[dict[str, Any]] = []
    for name, bits in BITS.items():
        kept = KvFormat(name, bits, 0.0 if name == "bf16" or scales == "none" else scale_bytes, scaled)
        row = _row(kept, room)
        first = rows[0] if rows else row
        row["times"] = row["tokens"] / first["tokens"] if first["tokens"] else None
        row["more_tokens"] = row["tokens"] - first["tokens"]
        row["more_requests"] = row["requests"] - first["requests"]
        rows.append(row)
        work += _work(kept, row, room)
    figures = [
        Figure("memory_bytes", "memory for KV", memory_bytes, as_bytes),
        Figure("context_tokens", "tokens of a request", request_tokens, as_count),
        Figure("block_tokens", "tokens of a block", block_tokens, as_count),
        Figure("elements_per_scale", "elements a scale is for", None if scales == "none" else scaled, as_count),
    ]
    notes = []
    if not rows[0]["tokens"]:
        notes.append("not one block fits in bf16: the weights leave no room, or the memory is small")
    if scales in {"block", "token"} and model.head_elements is None:
        notes.append(f"--head-dim: not given; {_USUAL_HEAD} assumed for the scales")
    write(Report(figures, [Rows("formats", _COLUMNS, rows)], work, notes, head=f"KV of {model.name}"), form)


def _beside_weights(model: ModelNumbers, gpu: GpuNumbers, share: float, weight_bits: int, work: list[Work]) -> float:
    if gpu.mem_bytes is None:
        refuse("--memory", "absent", "--memory SIZE such as 40GiB, or --gpu NAME of the table, or --gpu-memory-gb N")
    params = need(model.total_params, "of the weights beside the KV", "--params-b", by_name="--model")
    replicas = max(1.0, gpu.num_gpus / model.kv_heads) if model.kv_heads else 1.0
    found = kv_memory_bytes(gpu.mem_bytes, gpu.num_gpus, params * weight_bits / 8, share=share, replicas=replicas)
    work.append(
        Work(
            "memory for KV",
            "(share * GPUs * memory - parameters * bits/8) / copies;  copies = GPUs / KV heads, at least 1",
            f"({share:g} * {gpu.num_gpus} * {as_term(gpu.mem_bytes)} - {as_term(params)} * {weight_bits}/8) / {replicas:g}",
            f"{as_term(found)} B",
        )
    )
    return found


def _scaled_elements(model: ModelNumbers, scales: str, block_tokens: int, group_elements: int) -> float:
    head = model.head_elements or _USUAL_HEAD
    return {"none": 1, "group": group_elements, "token": head, "block": head * block_tokens}[scales]


def _row(kept: KvFormat, room: _Room) -> dict[str, Any]:
    bytes_per_token = kept.bytes_per_token(room.elements)
    scale_bytes = kept.scale_bytes_per_token(room.elements)
    fits = capacity(
        room.memory_bytes, bytes_per_token, block_tokens=room.block_tokens, request_tokens=room.request_tokens
    )
    return {
        "format": kept.name,
        "bits": kept.bits,
        "bytes_per_token": bytes_per_token,
        "scale_bytes_per_token": scale_bytes,
        "scale_share": scale_bytes / bytes_per_token,
        "tokens": fits.num_tokens,
        "requests": fits.num_requests,
    }


def _work(kept: KvFormat, row: dict[str, Any], room: _Room) -> list[Work]:
    elements, memory_bytes, block_tokens, request_tokens = room
    scale = f" + {kept.scale_bytes:g}/{as_term(kept.scaled_elements)}" if kept.scale_bytes else ""
    per_token = as_term(row["bytes_per_token"])
    blocks = row["tokens"] / block_tokens
    return [
        Work(
            f"{kept.name}: B per token",
            "elements * (bits/8 + scale bytes / elements a scale is for)",
            f"{as_term(elements)} * ({kept.bits:g}/8{scale})",
            f"{per_token} B",
        ),
        Work(
            f"{kept.name}: tokens",
            "floor(memory / (B per token * tokens of a block)) * tokens of a block",
            f"floor({as_term(memory_bytes)} / ({per_token} * {block_tokens})) * {block_tokens}",
            as_term(row["tokens"]),
        ),
        Work(
            f"{kept.name}: requests",
            "floor(blocks / ceil(tokens of a request / tokens of a block))",
            f"floor({as_term(blocks)} / ceil({request_tokens} / {block_tokens}))",
            as_term(row["requests"]),
        ),
    ]
