"""Compiles all kernels for GPUs that are not here. Run as a program: prints one JSON object per compilation.

With the argument `shapes` it compiles the shapes that `bench/bench_kernels.py` measures.

A process of its own, since Triton's interpreter and its compiler do not share one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("float64", "float64"),
    ("float64", "bfloat16"),
]
MEASURED_PAIRS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
NVIDIA = (80, 90, 100)
AMD = ("gfx942",)
MOVERS = ("flatten", "unflatten", "unflatten accumulate")
KERNELS = (*MOVERS, "flatten count", "squared_norm", "multiply")
SHAPES = [(chunk, warps) for chunk in (2048, 4096, 8192) for warps in (4, 8, 16)]  # those of bench_kernels


def compile_one(
    kernel: str, architecture: int | str, dtype: str, wire: str, shape: tuple[int, int] | None = None
) -> dict[str, object]:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpfuse_kernels import PointerTable
    from dpfuse_kernels.flatten import _flatten_kernel
    from dpfuse_kernels.launch_shape import launch_shape
    from dpfuse_kernels.launcher import ARGUMENTS, jit, triton_dtype
    from dpfuse_kernels.multiply import _multiply_kernel
    from dpfuse_kernels.squared_norm import _squared_norm_kernel
    from dpfuse_kernels.unflatten import _unflatten_kernel

    table = PointerTable(torch.zeros(1, dtype=getattr(torch, wire)), [], getattr(torch, dtype))
    usual = launch_shape(table.dtype, table.flat.dtype, 25 << 20)
    chunk, warps = shape or (usual.chunk, usual.warps)
    constants = {
        "TENSOR": triton_dtype(table.dtype),
        "WIRE": triton_dtype(table.flat.dtype),
        "COMPUTE": triton_dtype(table.compute_dtype),
        "SCALED": kernel.startswith(("flatten", "unflatten")),
    }
    name, _, option = kernel.partition(" ")
    if name == "flatten":
        constants["COUNT"] = option == "count"
    elif name == "unflatten":
        constants["ACCUMULATE"] = option == "accumulate"
    constants["CHUNK"] = chunk
    function: Any = {
        "flatten": _flatten_kernel,
        "unflatten": _unflatten_kernel,
        "squared_norm": _squared_norm_kernel,
        "multiply": _multiply_kernel,
    }[name]
    signature = ARGUMENTS | dict.fromkeys(constants, "constexpr")
    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    compiled = triton.compile(
        ASTSource(jit(function), signature, constexprs=constants),
        target=target,
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    assembly = compiled.asm["ptx" if nvidia else "amdgcn"]
    return {
        "kernel": kernel,
        "architecture": architecture,
        "dtype": dtype,
        "wire": wire,
        "shape": [chunk, warps],
        "assembly": assembly,
        "spilled": _nvidia_spills(compiled.asm["cubin"]) if nvidia else _amd_spills(assembly),
    }


def _nvidia_spills(cubin: bytes) -> int:
    """Bytes of stack and local memory, as cuobjdump reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"\b(?:STACK|LOCAL):(\d+)", report)
    if len(found) < 2:
        raise RuntimeError(f"no resource usage in {report!r}")
    return sum(map(int, found))


def _amd_spills(assembly: str) -> int:
    """Spilled registers and bytes of scratch, from the metadata of the code object."""
    found = re.findall(r"\.(?:[sv]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", assembly)
    if len(found) < 3:
        raise RuntimeError("no spill counts in the assembly")
    return sum(map(int, found))


def every_compilation() -> Iterator[dict[str, object]]:
    for architecture in (*NVIDIA, *AMD):
        for dtype, wire in PAIRS:
            for kernel in KERNELS:
                # What reads or writes tensors only knows no dtype of a buffer.
                if dtype == wire or kernel in (*MOVERS, "flatten count"):
                    yield compile_one(kernel, architecture, dtype, wire)


def every_shape() -> Iterator[dict[str, object]]:
    for shape in SHAPES:
        for dtype, wire in MEASURED_PAIRS:
            for kernel in MOVERS[:2]:
                yield compile_one(kernel, 90, dtype, wire, shape)


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    for row in every_shape() if sys.argv[1:] == ["shapes"] else every_compilation():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
