"""Compiles both kernels for GPUs that are not here. Run as a program: prints one JSON object per compilation.

A process of its own, since Triton's interpreter and its compiler do not share one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
    ("float64", "float64"),
    ("float64", "bfloat16"),
]
NVIDIA = (80, 90, 100)
AMD = ("gfx942",)
KERNELS = ("flatten", "unflatten", "unflatten accumulate")


def compile_one(kernel: str, architecture: int | str, dtype: str, wire: str) -> dict[str, object]:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpfuse_kernels import PointerTable
    from dpfuse_kernels.flatten import _flatten_kernel
    from dpfuse_kernels.launcher import CHUNK, NUM_WARPS, jit, triton_dtype
    from dpfuse_kernels.unflatten import _unflatten_kernel

    table = PointerTable(torch.zeros(1, dtype=getattr(torch, wire)), [], getattr(torch, dtype))
    constants = {
        "TENSOR": triton_dtype(table.dtype),
        "WIRE": triton_dtype(table.flat.dtype),
        "COMPUTE": triton_dtype(table.compute_dtype),
        "SCALED": True,
        "CHUNK": CHUNK,
    }
    function = _flatten_kernel
    if kernel.startswith("unflatten"):
        function = _unflatten_kernel
        constants["ACCUMULATE"] = kernel.endswith("accumulate")
    signature = {
        "flat_address": "i64",
        "address_ptr": "*i64",
        "chunk_ptr": "*i64",
        "scale_bits": "i64",
        "first_program": "i64",
        **dict.fromkeys(constants, "constexpr"),
    }
    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    compiled = triton.compile(
        ASTSource(jit(function), signature, constexprs=constants),
        target=target,
        options={"num_warps": NUM_WARPS, "enable_fp_fusion": False},
    )
    assembly = compiled.asm["ptx" if nvidia else "amdgcn"]
    return {
        "kernel": kernel,
        "architecture": architecture,
        "dtype": dtype,
        "wire": wire,
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


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    for architecture in (*NVIDIA, *AMD):
        for dtype, wire in PAIRS:
            for kernel in KERNELS:
                print(json.dumps(compile_one(kernel, architecture, dtype, wire)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
