"""Attention's Triton kernels without a GPU: computed by Triton's interpreter, compiled for three GPUs and looked at."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attention_cases import CASES, TOLERANCE
from compiled_kernels import compile_kernel, resources

triton = pytest.importorskip("triton", reason="triton is installed on Linux only")

INTERPRETER_DEADLINE_S = 100.0
SPILLED_NBYTES = (
    32  # a thread: ptxas gives up a few registers where one more program then fits; tiles too large took 48 to 3,176
)
SMALLEST_SHARED_NBYTES = (
    99 << 10
)  # of a program, on compute capability 8.6 and 8.9; 163 KiB on 8.0, 227 on 9.0 and 10.0


@pytest.fixture(scope="module")
def outcomes(interpreter_env) -> dict[str, dict]:
    program = Path(__file__).parent / "attention_cases.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=interpreter_env,
        capture_output=True,
        text=True,
        timeout=INTERPRETER_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {outcome["name"]: outcome for outcome in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_give_what_torch_gives(outcomes, case):
    outcome = outcomes[case.name]

    assert outcome["difference"] < TOLERANCE * case.gain
    assert outcome["same_pages"]
    assert outcome["zero_padding"]
    assert outcome["same_alone"]


def compile_attention(architecture: int, num_rows: int, head_dim: int, dtype: str = "fp16"):
    from kvstore.kernels import triton_attention

    tile = triton_attention.tile_of(num_rows, head_dim)
    pointers = {"out": "*fp32", "q": "*fp32", "pages": f"*{dtype}", "tables": "*i32", "contexts": "*i32"}
    constants = {
        "GROUP": 3,
        "HEAD_DIM": head_dim,
        "BLOCK_TOKENS": 16,
        "TILE_ROWS": tile.rows,
        "TILE_TOKENS": tile.tokens,
    }
    return compile_kernel(
        triton_attention._attend_kernel,
        architecture,
        {**pointers, "scale": "fp32"},
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@pytest.mark.parametrize(
    ("architecture", "num_rows", "head_dim"),
    [*itertools.product([80, 90, 100], [1, 512], [64, 128]), (90, 1, 256), (90, 512, 256)],
)
def test_pages_are_read_16_bytes_at_a_time_and_nothing_spills(architecture, num_rows, head_dim):
    kernel = compile_attention(architecture, num_rows, head_dim)

    ptx = kernel.asm["ptx"]
    copies = re.findall(r"cp\.async\.\w+\.shared\.global(?:\.\S+)? \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert copies, "K and V are copied to shared memory ahead of their use"
    assert {int(size, 16) for size in copies} == {16}
    assert not re.search(r"ld\.global\S*\.[bu](8|16)\b", ptx), "a number of 16 bits by itself"
    assert re.search(r"mma\S*\.tf32|kind::tf32", ptx), "products on tensor cores"
    used = resources(kernel)
    assert used["REG"] > 0
    assert used["STACK"] + used["LOCAL"] <= SPILLED_NBYTES
    assert kernel.metadata.shared <= SMALLEST_SHARED_NBYTES


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_are_written_8_bytes_at_a_time_or_more(dtype):
    from kvstore.kernels import triton_attention

    types = {"pages": f"*{dtype}", "k": "*fp32", "v": "*fp32", "tables": "*i32", "contexts": "*i32"}
    constants = {"HEADS": 3, "HEADS_PADDED": 4, "HEAD_DIM": 64, "BLOCK_TOKENS": 16}

    kernel = compile_kernel(triton_attention._write_kernel, 90, types, constants, num_warps=1)

    ptx = kernel.asm["ptx"]
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) <= {"v4.b32", "v2.b32"}
    assert "ld.global.v4.b32" in ptx
    assert resources(kernel)["STACK"] == 0
