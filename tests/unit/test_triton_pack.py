"""Pack and unpack in Triton without a GPU: computed by Triton's interpreter, compiled for three GPUs and looked at."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled_kernels import compile_kernel, resources
from pack_cases import CHECKS, INTERPRETED

from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.page_map import PageMap

pytest.importorskip("triton", reason="triton is installed on Linux only")

INTERPRETER_DEADLINE_S = 110.0


@pytest.fixture(scope="module")
def problems(interpreter_env) -> dict[str, str]:
    program = Path(__file__).parent / "pack_cases.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning:triton", str(program)],
        env=interpreter_env,
        capture_output=True,
        text=True,
        timeout=INTERPRETER_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {outcome["name"]: outcome["problem"] for outcome in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [*CHECKS, *(case.name for case in INTERPRETED)])
def test_the_kernels_give_what_torch_gives_to_the_bit(problems, name):
    assert not problems[name]


def compiled(kernel_name: str, architecture: int, pages: PageMap, quantisation: str):
    from kvstore.kernels import triton_pack

    constants = triton_pack.constants(pages, BlockPart.of(pages, quantisation=quantisation))
    return compile_kernel(
        getattr(triton_pack, kernel_name),
        architecture,
        {"bases": "*i64", "moves": "*i64"},
        constants,
        num_warps=triton_pack.num_warps(constants),
        enable_fp_fusion=False,
    )


def bulk_accesses(ptx: str, kind: str) -> set[str]:
    """Widths of the loads (ld) or stores (st) that are not of one scalar (an address, a page number, a scale)."""
    return set(re.findall(rf"{kind}\.global\.(v\S+|[bu](?:8|16))", ptx))


SHAPES = {"8 heads of 128": (8, 16, 128, 2), "heads of 80": (3, 16, 80, 2), "a latent of 576": (1, 64, 576, 1)}


@pytest.mark.parametrize(
    ("architecture", "shape", "quantisation"),
    [
        *itertools.product([80, 90], ["8 heads of 128"], ["", "fp8_e4m3"]),
        (80, "8 heads of 128", "int8"),
        (100, "8 heads of 128", ""),
        (100, "8 heads of 128", "fp8_e4m3"),
        (90, "heads of 80", ""),
        (80, "a latent of 576", "fp8_e4m3"),
    ],
)
def test_tiles_are_moved_16_bytes_at_a_time_and_nothing_spills(architecture, shape, quantisation):
    heads, tokens, dim, planes = SHAPES[shape]
    memory = torch.zeros(planes, 2, tokens, heads, dim, dtype=torch.bfloat16)
    pages = PageMap.of_layers([memory], "PBTHD")

    for name in ("_pack_kernel", "_unpack_kernel"):
        kernel = compiled(name, architecture, pages, quantisation)

        assert bulk_accesses(kernel.asm["ptx"], "ld") == {"v4.b32"}, name
        assert bulk_accesses(kernel.asm["ptx"], "st") == {"v4.b32"}, name
        used = resources(kernel)
        assert 0 < used["REG"] <= 128
        assert used["STACK"] + used["LOCAL"] == 0, name


def test_pages_that_are_not_aligned_are_moved_in_smaller_pieces():
    """An access of 16 bytes at another address would fault."""
    pages = PageMap.of_layers([torch.zeros(2, 2, 4, 2, 36, dtype=torch.bfloat16)[..., 1:]], "PBTHD")

    kernel = compiled("_pack_kernel", 90, pages, "")

    assert bulk_accesses(kernel.asm["ptx"], "ld") == {"b16"}


class DriverOfNoDevice:
    """What a launch asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class CompiledOnly:
    """In place of a kernel: a launch compiles, and launches nothing."""

    def __init__(self, kernel) -> None:
        self._kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.compiled.append(self._kernel.warmup(*args, grid=grid, **options))


@pytest.mark.parametrize("quantisation", ["", "fp8_e4m3"])
def test_a_launch_compiles_wide_accesses_once_whatever_the_layers_and_the_number_of_blocks(
    monkeypatch, tmp_path, quantisation
):
    """By the launcher's own arguments. A compilation in mid-service would hold up an engine for a second."""
    import triton
    from triton.runtime.driver import driver

    from kvstore.kernels import triton_pack

    kernel = CompiledOnly(triton_pack._unpack_kernel)
    monkeypatch.setattr(triton_pack, "_unpack_kernel", kernel)
    pages = PageMap.of_layers([torch.zeros(2, 5, 16, 8, 128, dtype=torch.bfloat16) for _ in range(20)], "PBTHD")
    packer = triton_pack.Packer(pages, BlockPart.of(pages, quantisation=quantisation, num_layers=33, first_layer=1))
    moves = torch.zeros(16, 2, dtype=torch.int64)

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        monkeypatch.setattr(driver, "_active", DriverOfNoDevice())
        for first, layers in ((0, range(20)), (1, range(1)), (2, range(16, 17)), (5, range(15, 20))):
            packer.unpack(moves[first:], layers)

    assert len(kernel.compiled) == 4
    assert len({id(one) for one in kernel.compiled}) == 1
    assert bulk_accesses(kernel.compiled[0].asm["ptx"], "ld") == {"v4.b32"}
    assert bulk_accesses(kernel.compiled[0].asm["ptx"], "st") == {"v4.b32"}
