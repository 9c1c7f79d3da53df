"""On a GPU: how fast are pages packed and unpacked, moved to and from host memory each way, and what is that worth in TTFT?

Needs torch, triton, numpy and xxhash, and no network: `make gpu-bench GPU_PYTHON=python3`. Without a GPU it says so. `--tiny`
runs it on the host in Triton's interpreter, for a test; its figures mean nothing.
"""

import argparse
import dataclasses
import json
import mmap
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.core.layout import BlockLayout
from kvstore.engine_connector.engine.device import prefill_chunk
from kvstore.engine_connector.engine.model import LayerWeights, ModelConfig, Transformer, Weights
from kvstore.engine_connector.engine.rope import Rope
from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.pinned import CudaHostMemory, HostMemory

if TYPE_CHECKING:  # needs triton, which a machine without a GPU may lack
    from kvstore.kernels.device_pages import DevicePages

QUESTION = "Blocks between a GPU and host memory"
COMMAND = "make gpu-bench GPU_PYTHON=python3 GPU_JSON=gpu.json"
NO_GPU = "this torch finds no GPU; run it on a machine with one"

Row = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Setting:
    """An 8B model's shape by default (32 layers, 8 KV heads of 128: blocks of 2 MiB)."""

    device: torch.device
    memory: HostMemory
    rounds: int = 30
    warm_up: int = 3
    start_rounds: int = 5
    layers: int = 32
    heads: int = 8
    tokens: int = 16
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 8, 64)  # blocks
    prompts: tuple[int, ...] = (512, 2048, 8192, 32768)  # tokens
    hidden: int = 4096
    query_heads: int = 32
    ffn: int = 14336
    vocab: int = 128256
    chunk: int = 512
    gemm: int = 4096

    def separate(self, num_pages: int) -> PageMap:
        """Pages as engines have them: a tensor of keys and one of values a layer, NHD."""
        shape = (num_pages, self.tokens, self.heads, self.dim)
        keys, values = ([self._numbers(*shape) for _ in range(self.layers)] for _ in "KV")
        return PageMap.of_separate(keys, values)

    def packed(self, num_pages: int) -> PageMap:
        """Pages that are blocks."""
        return PageMap.packed(self._numbers(num_pages, self.layers, self.heads, self.tokens, 2, self.dim))

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def synchronize(self) -> None:
        """Wait for the calling thread's stream alone."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="run these sections alone")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print a section of RESULTS.md from such a file")
    parser.add_argument(
        "--tiny", action="store_true", help="on the host, in Triton's interpreter: figures mean nothing"
    )
    arguments = parser.parse_args()
    if arguments.markdown:
        print(as_markdown(json.loads(arguments.markdown.read_text())))
        return
    setting = tiny() if arguments.tiny else on_gpu() if torch.cuda.is_available() else None
    result: dict[str, object] = {"question": QUESTION, "command": COMMAND, "machine": machine()}
    result |= {"rows": [], "remarks": []}
    if setting is None:
        result["remarks"] = [f"skipped: {NO_GPU}"]
        print(f"skipped: {NO_GPU}", file=sys.stderr)
    else:
        rows: list[Row] = []
        for name in arguments.only or SECTIONS:
            for row in SECTIONS[name](setting):
                print(json.dumps(row), flush=True)
                rows.append(row)
        result["rows"] = rows
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def on_gpu() -> Setting:
    device = torch.device("cuda", torch.cuda.current_device())
    return Setting(device, CudaHostMemory(device))


def tiny() -> Setting:
    """On the host. Kernels must be interpreted: TRITON_INTERPRET=1."""
    return Setting(
        torch.device("cpu"),
        _HostIsDevice(),
        rounds=1,
        warm_up=0,
        start_rounds=1,
        layers=2,
        heads=1,
        tokens=4,
        dim=16,
        batches=(2,),
        prompts=(32,),
        hidden=32,
        query_heads=2,
        ffn=32,
        vocab=64,
        chunk=16,
        gemm=16,
        dtype=torch.float16,
    )


class _HostIsDevice:
    """Kernels in the interpreter reach all memory."""

    reached_by_kernels = True

    def register(self, address: int, nbytes: int) -> bool:
        return address > 0 and nbytes > 0

    def unregister(self, address: int) -> None:
        pass


# --- sections --------------------------------------------------------------------------------------------------------------


def pack_and_unpack(setting: Setting) -> Iterator[Row]:
    """Kernels alone, pages to blocks in device memory, against a copy of the same bytes from device to device."""
    from kvstore.kernels.triton_pack import Packer, check_moves

    count = setting.batches[-1]
    pages = setting.separate(count)
    for quantisation in ("", "fp8_e4m3", "int8"):
        part = BlockPart.of(pages, quantisation=quantisation)
        blocks = torch.zeros(count, part.layout.nbytes, dtype=torch.uint8, device=setting.device)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        addresses = [block.data_ptr() for block in blocks]
        check_moves(pages, order, addresses)
        moves = torch.tensor([order, addresses], dtype=torch.int64).T.contiguous().to(setting.device)
        packer, layers = Packer(pages, part), range(pages.num_layers)
        page_nbytes = BlockPart.of(pages).layout.nbytes
        moved = count * (page_nbytes + part.layout.nbytes)  # read and written
        here, there = (torch.zeros(moved // 2, dtype=torch.uint8, device=setting.device) for _ in range(2))
        taken = measured(
            setting,
            {
                "copy": lambda here=here, there=there: there.copy_(here),
                "pack": lambda packer=packer, moves=moves, layers=layers: packer.pack(moves, layers),
                "unpack": lambda packer=packer, moves=moves, layers=layers: packer.unpack(moves, layers),
            },
            queued=True,
        )
        for name in ("pack", "unpack"):
            yield row(f"{name}, {quantisation or 'as it is'}", count, moved, taken[name], taken["copy"])


def host_copies(setting: Setting) -> Iterator[Row]:
    """All ways of both directions at several sizes, against one copy of the same bytes from or to page-locked memory."""
    from kvstore.kernels.device_pages import DevicePages

    most = setting.batches[-1]
    for place, pages in (("blocks", setting.packed(most)), ("separate", setting.separate(most))):
        for quantisation in ("", "fp8_e4m3") if place == "separate" else ("",):
            part = BlockPart.of(pages, quantisation=quantisation)
            copies = DevicePages(pages, part, memory=setting.memory)
            blocks = arena_blocks(part.layout.nbytes, most)
            for count in setting.batches:
                for layers in (range(1), range(setting.layers)):
                    yield from _copy_rows(setting, copies, f"{place} {quantisation}".strip(), blocks[:count], layers)


def _copy_rows(
    setting: Setting, copies: "DevicePages", place: str, blocks: Sequence[np.ndarray], layers: range
) -> Iterator[Row]:
    part = copies.part
    nbytes = len(blocks) * sum(run.nbytes for run in part.runs(layers))
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=setting.device.type == "cuda")
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=setting.device)
    ids = range(len(blocks))
    cases: dict[str, Callable[[], object]] = {
        "out": lambda: pinned.copy_(on_device, non_blocking=True),
        "in": lambda: on_device.copy_(pinned, non_blocking=True),
    }
    for way in copies.ways:
        cases[f"out {way}"] = lambda way=way: copies.copy_out_blocks(ids, blocks, layers, way=way)
        cases[f"in {way}"] = lambda way=way: copies.copy_in_blocks(ids, blocks, layers, way=way)
    taken = measured(setting, cases)
    for way in copies.ways:
        for direction in ("out", "in"):
            what = f"{direction} {way}, {place}, {len(layers)} of {setting.layers} layers"
            yield row(what, len(blocks), nbytes, taken[f"{direction} {way}"], taken[direction])


def choices(setting: Setting) -> Iterator[Row]:
    """What DevicePages measures at an engine's start: how long that takes, and what it would choose."""
    from kvstore.kernels.device_pages import DevicePages

    count = min(8, setting.batches[-1])
    for place, pages in (("blocks", setting.packed(count)), ("separate", setting.separate(count))):
        copies = DevicePages(pages, memory=setting.memory)
        started_s = time.perf_counter()
        points = copies.measure(rounds=setting.start_rounds)
        took_s = time.perf_counter() - started_s
        for direction, ones in points.items():
            for one in ones:
                what = f"start: {direction} {one.way}, {place}"
                yield {**row(what, 0, one.nbytes, [one.seconds], [one.seconds]), "of_limit": None}
        yield {
            **row(f"start: {place}, {copies.layers_a_copy(32)} layers a copy of 32 blocks", 32, 0, [took_s], [took_s]),
            "of_limit": None,
        }


def beside_compute(setting: Setting) -> Iterator[Row]:
    """What copies cost an engine: a chain of matrix products while blocks go out, against the same chain alone."""
    from kvstore.kernels.device_pages import DevicePages

    pages = setting.separate(setting.batches[-1])
    copies = DevicePages(pages, memory=setting.memory)
    blocks = arena_blocks(copies.page_nbytes, setting.batches[-1])
    x = torch.randn(setting.gemm, setting.gemm, device=setting.device).to(setting.dtype)

    def chain() -> None:
        y = x
        for _ in range(20):
            y = y @ x
        setting.synchronize()

    for way in copies.ways:
        for direction, copy in (("out", copies.copy_out_blocks), ("in", copies.copy_in_blocks)):
            stop = threading.Event()

            def keep_copying(copy: Callable[..., None] = copy, way: str = way, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    copy(range(len(blocks)), blocks, range(setting.layers), way=way)

            alone = [timed(chain) for _ in range(setting.warm_up + setting.rounds)][setting.warm_up :]
            thread = threading.Thread(target=keep_copying)
            thread.start()
            try:
                beside = [timed(chain) for _ in range(setting.rounds)]
            finally:
                stop.set()
                thread.join()
            yield row(f"20 products of {setting.gemm}, beside {direction} {way}", 0, 0, beside, alone)


def ttft(setting: Setting) -> Iterator[Row]:
    """The included engine's forward with random weights: a prompt computed, and all but its last 16 tokens loaded from the arena.
    As many layers of an 8B model as fit; scheduler, tokenizer and sidecar are not in it (benchmarks/overhead.py)."""
    from kvstore.kernels.device_pages import DevicePages

    layers = _layers_that_fit(setting)
    config = _config(setting, layers)
    with torch.inference_mode():
        model = Transformer(config, _random_weights(config, setting.device))
        for length in setting.prompts:
            num_pages = -(-length // setting.tokens)
            layout = BlockLayout(
                num_layers=layers,
                num_kv_heads=setting.heads,
                block_tokens=setting.tokens,
                planes=2,
                head_dim=setting.dim,
                item_nbytes=setting.dtype.itemsize,
            )
            pages = torch.zeros(num_pages, *layout.shape, dtype=setting.dtype, device=setting.device)
            copies = DevicePages.open(PageMap.packed(pages), memory=setting.memory, rounds=setting.start_rounds)
            blocks = arena_blocks(layout.nbytes, (length - 16) // setting.tokens)
            ids = torch.randint(0, setting.vocab, (length,), device=setting.device)

            def compute(first: int, ids: torch.Tensor = ids, pages: torch.Tensor = pages) -> None:
                for start in range(first, len(ids), setting.chunk):
                    end = min(len(ids), start + setting.chunk)
                    attention = prefill_chunk(pages, range(len(pages)), start, end)
                    positions = torch.arange(start, end, device=setting.device)
                    hidden = model.hidden(ids[start:end], positions, attention)
                model.logits(hidden[-1:]).argmax().item()

            def load(copies: DevicePages = copies, blocks: Sequence[np.ndarray] = blocks, length: int = length) -> None:
                copies.copy_in_blocks(range(len(blocks)), blocks, range(layers))
                compute(length - 16)

            compute(0)
            copies.copy_out_blocks(range(len(blocks)), blocks, range(layers))
            fewer = dataclasses.replace(setting, rounds=max(1, setting.rounds // 6))
            taken = measured(fewer, {"compute": lambda compute=compute: compute(0), "load": load})
            what = f"TTFT of {length} tokens, {layers} layers of {setting.hidden}, fp32 weights"
            yield row(f"{what}, computed", len(blocks), 0, taken["compute"], taken["compute"])
            yield row(f"{what}, loaded", len(blocks), len(blocks) * layout.nbytes, taken["load"], taken["compute"])


SECTIONS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "pack": pack_and_unpack,
    "copies": host_copies,
    "choices": choices,
    "compute": beside_compute,
    "ttft": ttft,
}
"""By name; a section takes a Setting and yields rows as `row` makes them."""


# --- measuring -------------------------------------------------------------------------------------------------------------


def row(what: str, blocks: int, nbytes: int, taken: Sequence[float], limit: Sequence[float]) -> Row:
    """`of_limit`: the limit's seconds over these, medians of runs that took turns."""
    ordered = sorted(taken)
    median_s = statistics.median(ordered)
    return {
        "what": what,
        "blocks": blocks,
        "MiB": round(nbytes / 2**20, 3),
        "p50_ms": round(median_s * 1e3, 4),
        "p99_ms": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3, 4),
        "GB_per_s": round(nbytes / median_s / 1e9, 2),
        "of_limit": round(statistics.median(limit) / median_s, 3),
        "n": len(ordered),
    }


def measured(
    setting: Setting, cases: dict[str, Callable[[], object]], *, queued: bool = False
) -> dict[str, list[float]]:
    """Seconds of each case, which take turns. `queued`: the device's time of what a call queues, not the call's."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    clock = _device_seconds if queued and setting.device.type == "cuda" else timed
    for number in range(-setting.warm_up, setting.rounds):
        for name, case in cases.items():

            def and_wait(case: Callable[[], object] = case) -> None:
                case()
                setting.synchronize()

            took_s = clock(case if clock is _device_seconds else and_wait)
            if number >= 0:
                seconds[name].append(took_s)
    return seconds


def timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _device_seconds(call: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def arena_blocks(nbytes: int, count: int) -> list[np.ndarray]:
    """Slots of 4 KiB steps in shared memory, none across 64 MiB: as the sidecar's arena."""
    segment, row_nbytes = 64 << 20, -(-nbytes // 4096) * 4096
    a_segment = segment // row_nbytes
    arena = np.frombuffer(mmap.mmap(-1, -(-count // a_segment) * segment, mmap.MAP_SHARED), np.uint8)
    starts = [i // a_segment * segment + i % a_segment * row_nbytes for i in range(count)]
    blocks = [arena[start : start + nbytes] for start in starts]
    for block in blocks:
        block[:] = 0  # touched
    return blocks


def _config(setting: Setting, layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        num_layers=layers,
        hidden_size=setting.hidden,
        num_heads=setting.query_heads,
        num_kv_heads=setting.heads,
        head_dim=setting.dim,
        ffn_size=setting.ffn,
        vocab_size=setting.vocab,
        context_length=max(setting.prompts),
        rms_eps=1e-5,
        rope=Rope(theta=500000.0),
        tied_embeddings=True,
    )


def _layers_that_fit(setting: Setting) -> int:
    """In half of the free memory: the rest is for pages and activations."""
    if setting.device.type == "cpu":
        return setting.layers
    heads = setting.query_heads + 2 * setting.heads
    layer = 4 * setting.hidden * (heads * setting.dim + setting.query_heads * setting.dim + 3 * setting.ffn)
    free, _ = torch.cuda.mem_get_info(setting.device)
    return max(1, min(setting.layers, (free // 2 - 4 * setting.vocab * setting.hidden) // layer))


def _random_weights(config: ModelConfig, device: torch.device) -> Weights:
    def matrix(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, device=device) * into**-0.5

    heads, dim = config.num_heads, config.head_dim
    ones = torch.ones(config.hidden_size, device=device)
    layers = tuple(
        LayerWeights(
            attn_norm=ones,
            qkv=matrix((heads + 2 * config.num_kv_heads) * dim, config.hidden_size),
            qkv_bias=None,
            qk_norm=None,
            attn_out=matrix(config.hidden_size, heads * dim),
            ffn_norm=ones,
            gate_up=matrix(2 * config.ffn_size, config.hidden_size),
            down=matrix(config.hidden_size, config.ffn_size),
        )
        for _ in range(config.num_layers)
    )
    embedding = matrix(config.vocab_size, config.hidden_size)
    return Weights(embedding, layers, ones, embedding)


def machine() -> dict[str, str]:
    """Where and when."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "cuda": str(torch.version.cuda),
        "packages": f"torch {torch.__version__}, {_triton()}, numpy {np.__version__}",
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _triton() -> str:
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return "no triton"


def as_markdown(result: dict) -> str:
    """A section of RESULTS.md."""
    lines = [f"## {result['question']}", "", f"`{result['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in result["machine"].items()] + [""]
    if result["rows"]:
        names = list(result["rows"][0])
        lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in result["rows"]]
    return "\n".join(lines + [f"- {remark}" for remark in result["remarks"]] + [""])


if __name__ == "__main__":
    main()
