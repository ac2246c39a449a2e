"""Compiles kernels for one GPU that is not here. Run as a program: prints one JSON object per compilation.

The first argument says what is compiled: `copies` is all that copies, measures, scales, adds or updates, `shapes` those
that `bench/bench_kernels.py` measures, `spoil` the kernel that fills with NaN, `bit_hash` that which hashes weights,
and `mx` the kernels of eight-bit blocks.
The second argument is the architecture: 90 for sm_90, gfx942 for AMD's. The third and the fourth say which part of how
many it compiles, so that several processes can share the work: 0 2 is every other one from the first.

A process of its own, since Triton's interpreter and its compiler do not share one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
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
FLATTENS = ("flatten count", "flatten factor residual", "flatten factor accumulate")
MOVERS = ("flatten", "unflatten")
KERNELS = (*MOVERS, *FLATTENS, "squared_norm", "multiply")
SUM_TYPES = {"float32": "float32", "bfloat16": "float32", "float16": "float32", "float64": "float64"}  # added up in
ADAMW_KERNELS = ("adamw decoupled", "adamw coupled factor maximize")
ADAMW_PAIRS = [  # of the parameter, which has a float32 master where it is narrow, and of the gradient
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
]
MX_KERNELS = (
    "quantize",
    "quantize count factor residual",
    "dequantize",
    "sum_quantized residual",
)
MX_TYPES = [("float32", "e4m3"), ("bfloat16", "e5m2")]
SHAPES = [(1024, 2), *product((2048, 4096, 8192), (4, 8, 16))]  # those of bench_kernels


def fits(kernel: str, dtype: str, wire: str) -> bool:
    """Is there such a kernel, and is it compiled here? What reads or writes tensors only knows no dtype of a buffer."""
    if kernel.startswith("flatten factor"):
        return (dtype, wire) in (*MEASURED_PAIRS, ("float16", "float16"))
    return dtype == wire or kernel in (*MOVERS, *FLATTENS)


def compile_one(
    kernel: str, architecture: int | str, dtype: str, wire: str, shape: tuple[int, int] | None = None
) -> dict[str, object]:
    import torch

    from dpfuse_kernels import PointerTable
    from dpfuse_kernels.flatten import _flatten_kernel
    from dpfuse_kernels.launch_shape import DEFAULT
    from dpfuse_kernels.launcher import ARGUMENTS, triton_dtype
    from dpfuse_kernels.multiply import _multiply_kernel
    from dpfuse_kernels.squared_norm import _squared_norm_kernel
    from dpfuse_kernels.unflatten import _unflatten_kernel

    table = PointerTable(torch.zeros(1, dtype=getattr(torch, wire)), [], getattr(torch, dtype))
    chunk, warps = shape or (DEFAULT.chunk, DEFAULT.warps)
    constants = {
        "TENSOR": triton_dtype(table.dtype),
        "WIRE": triton_dtype(table.flat.dtype),
        "COMPUTE": triton_dtype(table.compute_dtype),
        "SCALED": kernel.startswith(("flatten", "unflatten")),
    }
    name, *given = kernel.split()
    functions: dict[str, Any] = {
        "flatten": _flatten_kernel,
        "unflatten": _unflatten_kernel,
        "squared_norm": _squared_norm_kernel,
        "multiply": _multiply_kernel,
    }
    kinds = functions[name].__annotations__
    options = ("COUNT", "FACTOR", "RESIDUAL", "ACCUMULATE")
    constants |= {option: option.lower() in given for option in options if option in kinds}
    constants["CHUNK"] = chunk
    own = {argument: "i64" for argument in kinds if argument.endswith("_address")}
    row = {"kernel": kernel, "dtype": dtype, "wire": wire}
    return row | _compiled(functions[name], ARGUMENTS | own, constants, architecture, chunk, warps)


def compile_sum(architecture: int | str, dtype: str, *, residual: bool = False) -> dict[str, object]:
    import triton.language as tl

    from dpfuse_kernels.launch_shape import DEFAULT
    from dpfuse_kernels.sum_parts import _sum_parts_kernel

    types = {"WIRE": getattr(tl, dtype), "SUM": getattr(tl, SUM_TYPES[dtype])}
    constants = {**types, "RESIDUAL": residual, "CHUNK": DEFAULT.chunk}
    names = ("parts_address", "out_address", "count", "numel", "first_program", "residual_address")
    arguments = dict.fromkeys(names, "i64")
    row = {"kernel": "sum_parts residual" if residual else "sum_parts", "dtype": dtype, "wire": dtype}
    return row | _compiled(_sum_parts_kernel, arguments, constants, architecture, DEFAULT.chunk, DEFAULT.warps)


def compile_adamw(kernel: str, architecture: int | str, dtype: str, wire: str) -> dict[str, object]:
    import triton.language as tl

    from dpfuse_kernels.adamw import SHAPE, _adamw_kernel

    given = kernel.split()
    options = ("FACTOR", "MAXIMIZE", "DECOUPLED", "COUPLED")
    constants = {"WIRE": getattr(tl, wire), "PARAM": getattr(tl, dtype), "MASTER": dtype != "float32"}
    constants |= {option: option.lower() in given for option in options}
    constants["CHUNK"] = SHAPE.chunk
    types = {"tl.int64": "i64", "tl.float32": "fp32"}
    arguments = {name: types[kind] for name, kind in _adamw_kernel.__annotations__.items() if kind in types}
    row = {"kernel": kernel, "dtype": dtype, "wire": wire}
    return row | _compiled(_adamw_kernel, arguments, constants, architecture, SHAPE.chunk, SHAPE.warps)


def compile_spoil(architecture: int | str, dtype: str) -> dict[str, object]:
    import triton.language as tl

    from dpfuse_kernels.spoil import CHUNK, PAIRS, WARPS, _spoil_kernel

    numbers = ("chunks", "pairs", "from_address", "to_address", "copied")
    arguments = {"pair_address": "i64", "address_ptr": "*i64", "chunk_ptr": "*i64", **dict.fromkeys(numbers, "i64")}
    constants = {"PAIR": getattr(tl, dtype), "TENSOR": getattr(tl, dtype), "PAIRS": PAIRS, "CHUNK": CHUNK}
    return {"kernel": "spoil", "dtype": dtype} | _compiled(
        _spoil_kernel, arguments, constants, architecture, CHUNK, WARPS
    )


def compile_bit_hash(architecture: int | str, dtype: str) -> dict[str, object]:
    import triton.language as tl

    from dpfuse_kernels.bit_hash import CHUNK, WARPS, _bit_hash_kernel

    numbers = ("first_row", "seed", "state_address", "pair_address")
    arguments = {"address_ptr": "*i64", "row_ptr": "*i64", **dict.fromkeys(numbers, "i64")}
    constants = {"PAIR": getattr(tl, dtype), "CHUNK": CHUNK}
    return {"kernel": "bit_hash", "dtype": dtype} | _compiled(
        _bit_hash_kernel, arguments, constants, architecture, CHUNK, WARPS
    )


def compile_mx(kernel: str, architecture: int | str, dtype: str, format: str) -> dict[str, object]:
    import triton.language as tl

    from dpfuse_kernels.dequantize import _dequantize_kernel
    from dpfuse_kernels.launch_shape import DEFAULT
    from dpfuse_kernels.launcher import ARGUMENTS
    from dpfuse_kernels.quantize import _quantize_kernel
    from dpfuse_kernels.sum_quantized import _sum_quantized_kernel

    name, *given = kernel.split()
    functions: dict[str, Any] = {
        "quantize": _quantize_kernel,
        "dequantize": _dequantize_kernel,
        "sum_quantized": _sum_quantized_kernel,
    }
    kinds = functions[name].__annotations__
    types = {"TENSOR": getattr(tl, dtype), "WIRE": tl.uint8, "COMPUTE": tl.float32}
    options = {"SCALED": True, "E4M3": format == "e4m3", "CHUNK": DEFAULT.chunk}
    options |= {option: option.lower() in given for option in ("COUNT", "FACTOR", "RESIDUAL")}
    constants = {key: (types | options)[key] for key, kind in kinds.items() if kind == "tl.constexpr"}
    arguments = {key: ARGUMENTS.get(key, "i64") for key in kinds if key not in constants and key != "return"}
    row = {"kernel": kernel, "dtype": dtype, "wire": format}
    return row | _compiled(functions[name], arguments, constants, architecture, DEFAULT.chunk, DEFAULT.warps)


def _compiled(
    function: Callable[..., None],
    arguments: dict[str, str],
    constants: dict[str, object],
    architecture: int | str,
    chunk: int,
    warps: int,
) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dpfuse_kernels.launcher import jit

    signature = arguments | dict.fromkeys(constants, "constexpr")
    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda", architecture, 32) if nvidia else GPUTarget("hip", architecture, 64)
    compiled = triton.compile(
        ASTSource(jit(function), signature, constexprs=constants),
        target=target,
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    assembly = compiled.asm["ptx" if nvidia else "amdgcn"]
    return {
        "architecture": architecture,
        "shape": [chunk, warps],
        "assembly": assembly,
        "reductions": _reductions(compiled.asm["ttgir"]),
        **(_nvidia_resources(compiled.asm["cubin"]) if nvidia else {"spilled": _amd_spills(assembly)}),
    }


def _reductions(ttgir: str) -> list[str]:
    """What is reduced over all threads, with its layout: that fixes the order of the additions."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<(.*?), (#\w+)>\) ->', ttgir, re.DOTALL)
    return [f"{kind} in {layouts[name]}" for kind, name in reduced]


def _nvidia_resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes that it spills to stack and local memory, as cuobjdump reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report))
    if len(found) < 3:
        raise RuntimeError(f"no resource usage in {report!r}")
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"]) + int(found["LOCAL"])}


def _amd_spills(assembly: str) -> int:
    """Spilled registers and bytes of scratch, from the metadata of the code object."""
    found = re.findall(r"\.(?:[sv]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", assembly)
    if len(found) < 3:
        raise RuntimeError("no spill counts in the assembly")
    return sum(map(int, found))


Compilation = Callable[[], dict[str, object]]


def every_copy(architecture: int | str) -> Iterator[Compilation]:
    for dtype, wire in PAIRS:
        for kernel in KERNELS:
            if fits(kernel, dtype, wire):
                yield partial(compile_one, kernel, architecture, dtype, wire)
    for dtype in SUM_TYPES:
        yield partial(compile_sum, architecture, dtype)
        if dtype != "float64":
            yield partial(compile_sum, architecture, dtype, residual=True)
    for kernel, (dtype, wire) in product(ADAMW_KERNELS, ADAMW_PAIRS):
        yield partial(compile_adamw, kernel, architecture, dtype, wire)


def every_shape(architecture: int | str) -> Iterator[Compilation]:
    for shape in SHAPES:
        for dtype, wire in MEASURED_PAIRS:
            for kernel in MOVERS:
                yield partial(compile_one, kernel, architecture, dtype, wire, shape)


def every_spoil(architecture: int | str) -> Iterator[Compilation]:
    for dtype in SUM_TYPES:
        yield partial(compile_spoil, architecture, dtype)


def every_bit_hash(architecture: int | str) -> Iterator[Compilation]:
    for dtype in ("float32", "float64"):
        yield partial(compile_bit_hash, architecture, dtype)


def every_mx(architecture: int | str) -> Iterator[Compilation]:
    for kernel in MX_KERNELS:
        for dtype, format in MX_TYPES:
            yield partial(compile_mx, kernel, architecture, dtype, format)


def main(what: str, architecture: str, part: str, parts: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    every = {
        "copies": every_copy,
        "shapes": every_shape,
        "spoil": every_spoil,
        "bit_hash": every_bit_hash,
        "mx": every_mx,
    }[what]
    compilations = every(int(architecture) if architecture.isdigit() else architecture)
    for compilation in islice(compilations, int(part), None, int(parts)):
        print(json.dumps(compilation()), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
