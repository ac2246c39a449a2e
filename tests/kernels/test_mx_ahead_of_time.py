"""The machine code of the kernels of eight-bit blocks. `make test` compiles for sm_90 only."""

from __future__ import annotations

import re

import pytest

from tests.kernels.compile_kernels import AMD, MX_KERNELS, MX_TYPES, NVIDIA
from tests.kernels.ptx import narrow_products_in_addresses
from tests.kernels.test_ahead_of_time import WIDE_AMD, WIDE_NVIDIA, Compiled, accesses, targets


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled("mx")


every_kernel = pytest.mark.parametrize(
    ("kernel", "dtype", "format"),
    [(kernel, dtype, format) for kernel in MX_KERNELS for dtype, format in MX_TYPES],
)
every_nvidia = targets(*NVIDIA)
every_amd = targets(*AMD)
every_architecture = targets(*NVIDIA, *AMD)


@every_kernel
@every_nvidia
def test_elements_tensors_and_errors_move_128_bits_at_a_time(
    compiled: Compiled, kernel: str, architecture: int, dtype: str, format: str
) -> None:
    row = compiled[kernel, architecture, dtype, format]
    assembly = str(row["assembly"])
    loads = len(re.findall(WIDE_NVIDIA.format("ld"), assembly))
    stores = len(re.findall(WIDE_NVIDIA.format("st"), assembly))
    chunk, warps = row["shape"]
    elements = chunk // (warps * 32) // 16
    errors = accesses(row, "float32") if kernel.endswith("residual") else 0
    assert elements > 0
    assert (loads, stores) == {
        "quantize": (accesses(row, dtype) + errors, elements + errors),
        "dequantize": (elements, accesses(row, dtype)),
        # The first part, and the one that the loop is at.
        "sum_quantized": (2 * elements + errors, elements + errors),
    }[kernel.split()[0]]


@every_kernel
@every_amd
def test_tensors_and_errors_move_128_bits_at_a_time_on_amd(
    compiled: Compiled, kernel: str, architecture: str, dtype: str, format: str
) -> None:
    # With 64 threads to a warp each has eight elements, so eight bytes.
    row = compiled[kernel, architecture, dtype, format]
    assembly = str(row["assembly"])
    errors = accesses(row, "float32") if kernel.endswith("residual") else 0
    loads = errors + (accesses(row, dtype) if kernel.startswith("quantize") else 0)
    stores = errors + (accesses(row, dtype) if kernel.startswith("dequantize") else 0)
    assert len(re.findall(WIDE_AMD.format("load"), assembly)) == loads
    assert len(re.findall(WIDE_AMD.format("store"), assembly)) == stores


@every_kernel
@every_architecture
def test_nothing_spills(compiled: Compiled, kernel: str, architecture: int | str, dtype: str, format: str) -> None:
    assert compiled[kernel, architecture, dtype, format]["spilled"] == 0


@every_kernel
@every_nvidia
def test_the_bits_are_made_by_plain_arithmetic_at_64_bit_addresses(
    compiled: Compiled, kernel: str, architecture: int, dtype: str, format: str
) -> None:
    """No conversion of the hardware's to or from eight bits, nothing fused, subnormal numbers kept."""
    assembly = str(compiled[kernel, architecture, dtype, format]["assembly"])
    assert not re.search(r"cvt\.[\w.]*(?:e4m3|e5m2|ue8m0)", assembly)
    assert not re.search(r"\bfma\.", assembly)
    assert ".ftz" not in assembly
    assert not narrow_products_in_addresses(assembly)
    assert not re.findall(r"\bshl\.b32[^\n]*;\n[^\n]*cvt\.[su]64\.[su]32", assembly)
