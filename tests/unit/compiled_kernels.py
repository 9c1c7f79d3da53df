"""Triton kernels compiled for a GPU that is not there."""

import re
import subprocess
import tempfile
from typing import Any


def compile_kernel(
    kernel: Any, architecture: int, types: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    """Compiled as a launch would, when every pointer and every stride but that of a block table is a multiple of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = [
        i
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name.startswith("stride") and name != "stride_table")
    ]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        target = GPUTarget("cuda", architecture, 32)
        return triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread (REG), and bytes a thread that did not fit in them (STACK, LOCAL)."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        dump = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=30, check=True
        )
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout)}
