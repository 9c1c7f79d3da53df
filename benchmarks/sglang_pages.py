"""What SGLang pays for a call of 128 pages: our backend, its own file backend, and a copy of the same bytes.

    make sglang-test PYTEST_ARGS=--collect-only    # the environment, once
    .venv-sglang/bin/python -m benchmarks.sglang_pages

SGLang's host pool and its way to call a backend are the real ones; 30 layers of 3 KV heads of 64, pages of 16 tokens. The file
backend writes to a file system in memory, so that no drive is measured.
"""

import ctypes
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Report, Row, interleave, machine_card, millis, paired_ratio, show
from benchmarks.sidecar import running_sidecar

QUESTION = "SGLang: 128 pages between its host pool and the store"
SHIMS = Path(__file__).parent.parent / "tests" / "sglang"
LAYERS, HEADS, HEAD_DIM, NUM_PAGES = 30, 3, 64, 128
ARENA_BYTES = 1 << 30


def run(layout: str, rounds: int) -> Report:
    sys.path.insert(0, str(SHIMS))
    import hicache

    hicache.HEAD_DIM = HEAD_DIM
    pool = hicache.host_pool(layout, heads=HEADS, layers=LAYERS, pages=2 * NUM_PAGES)
    indices = pool.alloc(NUM_PAGES * hicache.PAGE)
    prompts = itertools.count()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-sglang-") as name, running_sidecar(ARENA_BYTES) as socket:
        (model := Path(name) / "model").mkdir()
        (model / "model.safetensors").write_bytes(b"weights")
        names = {"module_path": "kvstore.engine_connector.sglang", "class_name": "KVStoreHiCache"}
        extra = names | {
            "backend_name": "kvstore",
            "interface_v1": 1,
            "socket": str(socket),
            "model_path": str(model),
        }
        ours = hicache.Engine(pool, backend="dynamic", extra=extra)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            files = hicache.Engine(pool, backend="file", extra={"file_storage_path": f"{folder}/files"})
            cases = _cases(hicache, pool, indices, prompts, {"kvstore": ours, "file backend": files})
            samples = interleave(cases, rounds=rounds)
            files.close()
        ours.close()
    nbytes = NUM_PAGES * pool.get_dummy_flat_data_page().nbytes
    rows: list[Row] = [
        {
            "case": case,
            "p50_ms": millis(taken.median_s),
            "p99_ms": millis(taken.p99_s),
            "gb_per_s": round(nbytes / taken.median_s / 1e9, 2),
            "of_memcpy": round(1 / paired_ratio(taken, samples["memcpy"]), 2),
            "n": len(taken),
        }
        for case, taken in samples.items()
    ]
    remarks = [f"{NUM_PAGES} pages of {nbytes // NUM_PAGES:,} bytes, layout {layout}"]
    command = f"python -m benchmarks.sglang_pages --layout {layout} --rounds {rounds}"
    return Report(question=QUESTION, command=command, rows=rows, remarks=remarks)


def _cases(
    hicache: Any, pool: Any, indices: Any, prompts: Any, engines: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    addresses, sizes = pool.get_page_buffer_meta(indices)
    other = ctypes.create_string_buffer(sum(sizes))
    warm = hicache.get_storage_hash_str(list(range(NUM_PAGES * hicache.PAGE)), page_size=hicache.PAGE)

    def copy() -> None:
        target = ctypes.addressof(other)
        for address, nbytes in zip(addresses, sizes, strict=True):
            ctypes.memmove(target, address, nbytes)
            target += nbytes

    def save(engine: Any, keys: list[str]) -> None:
        assert engine.controller.page_set_func(keys, indices)

    def save_new(engine: Any) -> None:
        tokens = [next(prompts), *range(NUM_PAGES * hicache.PAGE - 1)]
        save(engine, hicache.get_storage_hash_str(tokens, page_size=hicache.PAGE))

    def load(engine: Any) -> None:
        operation = hicache.SimpleNamespace(request_id="", is_terminated=lambda: False)
        assert engine.controller.page_get_func(operation, warm, indices) == NUM_PAGES

    cases: dict[str, Callable[[], object]] = {"memcpy": copy}
    for name, engine in engines.items():
        save(engine, warm)
        cases[f"{name}, save"] = lambda engine=engine: save_new(engine)
        cases[f"{name}, look up and load"] = lambda engine=engine: (engine.backend.batch_exists(warm), load(engine))
    return cases


@click.command()
@click.option("--layout", default="page_first", show_default=True)
@click.option("--rounds", default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, layout: str, rounds: int, as_json: bool) -> None:
    card = machine_card()
    show(run(layout, rounds), card, as_json=as_json)


if __name__ == "__main__":
    main()
