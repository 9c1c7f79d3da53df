"""Attention's Triton kernels without a GPU: computed by Triton's interpreter, compiled for three GPUs and looked at."""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from attention_cases import CASES, TOLERANCE

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


@pytest.fixture(scope="module")
def compile_for(tmp_path_factory):
    """Compiled as a launch would, when every pointer and every stride but that of the block table is a multiple of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compiled(kernel, architecture: int, types: dict[str, str], constants: dict, **options):
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        aligned = [
            i
            for i, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") or (name.startswith("stride") and name != "stride_table")
        ]
        source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
        target = GPUTarget("cuda", architecture, 32)
        return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield compiled


def compile_attention(compile_for, architecture: int, num_rows: int, head_dim: int, dtype: str = "fp16"):
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
    return compile_for(
        triton_attention._attend_kernel,
        architecture,
        {**pointers, "scale": "fp32"},
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def resources(kernel) -> dict[str, int]:
    """Registers a thread (REG), and bytes a thread that did not fit in them (STACK, LOCAL)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        dump = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=30, check=True
        )
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout)}


@pytest.mark.parametrize(
    ("architecture", "num_rows", "head_dim"),
    [*itertools.product([80, 90, 100], [1, 512], [64, 128]), (90, 1, 256), (90, 512, 256)],
)
def test_pages_are_read_16_bytes_at_a_time_and_nothing_spills(compile_for, architecture, num_rows, head_dim):
    kernel = compile_attention(compile_for, architecture, num_rows, head_dim)

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
def test_rows_are_written_8_bytes_at_a_time_or_more(compile_for, dtype):
    from kvstore.kernels import triton_attention

    types = {"pages": f"*{dtype}", "k": "*fp32", "v": "*fp32", "tables": "*i32", "contexts": "*i32"}
    constants = {"HEADS": 3, "HEADS_PADDED": 4, "HEAD_DIM": 64, "BLOCK_TOKENS": 16}

    kernel = compile_for(triton_attention._write_kernel, 90, types, constants, num_warps=1)

    ptx = kernel.asm["ptx"]
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) <= {"v4.b32", "v2.b32"}
    assert "ld.global.v4.b32" in ptx
    assert resources(kernel)["STACK"] == 0
