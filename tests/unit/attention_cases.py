"""Shapes of work for paged attention on the GPU, each compared with the torch path: in Triton's interpreter, and on a device.

As a program it runs all of them in the interpreter and prints a line of JSON for each:
    TRITON_INTERPRET=1 python attention_cases.py
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent.parent))

from kvstore.engine_connector.engine.attention import DecodeBatch, PrefillChunk

LAYERS, LAYER, NUM_PAGES = 3, 1, 40
PAD_ROWS = 3

TOLERANCE = 1e-5
"""For numbers near 1, of results in fp32 summed in another order. With TF32's 10 bits they would be 1e-3 apart."""


@dataclass(frozen=True)
class Case:
    """A decode batch of sequences with these contexts, or (with `start`) the chunk [start, contexts[0]) of one sequence."""

    name: str
    contexts: tuple[int, ...]
    start: int | None = None
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    block_tokens: int = 16
    dtype: str = "float16"
    gain: float = 1.0  # of the queries: scores are so many times as large


CASES = [
    Case("one token", (1,)),
    Case("lengths from one token to several tiles", (1, 16, 17, 63, 64, 65, 129)),
    Case("one query head a KV head", (5, 70), group=1),
    Case("four query heads a KV head", (33, 48), group=4),
    Case("more query heads than a tile has rows", (20, 3), group=20, kv_heads=1),
    Case("one KV head of three, page of 32", (31, 32, 33), kv_heads=3, group=1, block_tokens=32),
    Case("head of 16", (67, 2), head_dim=16, group=4),
    Case("head of 128, page of 32", (100, 37), head_dim=128, kv_heads=1, block_tokens=32),
    Case("head of 256", (40, 7), head_dim=256, kv_heads=1),
    Case("page of 5 tokens", (23, 4), block_tokens=5),
    Case("bfloat16", (50, 8), dtype="bfloat16"),
    Case("large scores", (90, 12), gain=40.0),
    Case("chunk from the start", (37,), start=0),
    Case("chunk from the middle of a page", (75,), start=21),
    Case("chunk of two rows", (50,), start=48),
    Case("chunk of one row", (34,), start=33),
    Case("chunk, one query head a KV head", (70,), start=3, group=1),
    Case("chunk, four query heads a KV head, page of 32", (64,), start=32, group=4, block_tokens=32),
    Case("chunk, head of 16", (41,), start=7, head_dim=16),
    Case("chunk, head of 128", (45,), start=16, head_dim=128, kv_heads=1),
    Case("chunk, head of 256", (20,), start=5, head_dim=256, kv_heads=1, group=2),
    Case("chunk, page of 5 tokens", (29,), start=8, block_tokens=5),
    Case("chunk, bfloat16", (40,), start=9, dtype="bfloat16"),
    Case("chunk, large scores", (48,), start=16, gain=40.0),
]


@dataclass(frozen=True)
class Outcome:
    name: str
    difference: float  # largest, from the torch path; NaN where there is one
    same_pages: bool  # to the bit: new rows, what was there before, and rubbish beyond the ends
    zero_padding: bool
    same_alone: bool  # a sequence of a batch comes out with the same bits when it is alone


def run(case: Case, device: str) -> Outcome:
    """All memory that belongs to no token of the sequences is NaN."""
    from kvstore.engine_connector.engine.gpu_attention import GpuDecodeBatch, GpuPrefillChunk

    generator = torch.Generator().manual_seed(len(case.name))
    rows = case.contexts[0] - case.start if case.start is not None else len(case.contexts)
    tables = _tables(case, generator)
    pages = _pages(case, tables, generator)
    heads = case.kv_heads * case.group
    qkv = torch.randn(rows + PAD_ROWS, heads + 2 * case.kv_heads, case.head_dim, generator=generator)
    q, k, v = qkv.split([heads, case.kv_heads, case.kv_heads], dim=1)
    q *= case.gain
    ours = pages.to(device)
    expected = torch.nan_to_num(pages, nan=0.0)  # the torch path wants numbers beyond the ends

    if case.start is not None:
        wanted = PrefillChunk(expected, tables[0], case.start, case.contexts[0])(LAYER, q, k, v)
        attention = GpuPrefillChunk(ours, tables[0], case.start, case.contexts[0])
    else:
        positions = [context - 1 for context in case.contexts]
        wanted = DecodeBatch(expected, tables, positions)(LAYER, q, k, v)
        attention = GpuDecodeBatch(ours, tables, positions)
    got = attention(LAYER, *(x.to(device) for x in qkv.split([heads, case.kv_heads, case.kv_heads], dim=1)))

    filled = torch.where(_in_layer(_tokens(case, tables, 0)), expected, pages)
    return Outcome(
        case.name,
        float((got.cpu() - wanted)[:rows].abs().max()),
        torch.equal(ours.cpu().view(torch.int16), filled.view(torch.int16)),
        not got[rows:].any().item(),
        case.start is not None or _same_alone(case, ours, tables, qkv.to(device), got),
    )


def _same_alone(case: Case, pages: torch.Tensor, tables: list[list[int]], qkv: torch.Tensor, got: torch.Tensor) -> bool:
    from kvstore.engine_connector.engine.gpu_attention import GpuDecodeBatch

    heads = case.kv_heads * case.group
    for row, (table, context) in enumerate(zip(tables, case.contexts, strict=True)):
        parts = qkv[row : row + 1].split([heads, case.kv_heads, case.kv_heads], dim=1)
        if not torch.equal(GpuDecodeBatch(pages, [table], [context - 1])(LAYER, *parts), got[row : row + 1]):
            return False
    return True


def _tables(case: Case, generator: torch.Generator) -> list[list[int]]:
    """Each sequence has pages of its own, in no order, and one more than it needs."""
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    return [[free.pop() for _ in range(-(-context // case.block_tokens) + 1)] for context in case.contexts]


def _pages(case: Case, tables: list[list[int]], generator: torch.Generator) -> torch.Tensor:
    shape = (NUM_PAGES, LAYERS, case.kv_heads, case.block_tokens, 2, case.head_dim)
    pages = torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))
    rows = case.contexts[0] - case.start if case.start is not None else 1
    visible = _in_layer(_tokens(case, tables, rows))
    return torch.where(visible, pages, torch.nan)


def _tokens(case: Case, tables: list[list[int]], num_new: int) -> torch.Tensor:
    """`[NUM_PAGES, T] bool`: where the sequences' tokens lie, without their last `num_new`."""
    tokens = torch.zeros(NUM_PAGES, case.block_tokens, dtype=torch.bool)
    for table, context in zip(tables, case.contexts, strict=True):
        for position in range(context - num_new):
            tokens[table[position // case.block_tokens], position % case.block_tokens] = True
    return tokens


def _in_layer(tokens: torch.Tensor) -> torch.Tensor:
    """The same, to go with pages: of the layer that is attended to."""
    return tokens[:, None, None, :, None, None] & (torch.arange(LAYERS) == LAYER)[None, :, None, None, None, None]


def main() -> None:
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps(asdict(run(case, "cpu"))), flush=True)


if __name__ == "__main__":
    main()
