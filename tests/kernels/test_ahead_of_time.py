"""The machine code of all kernels: vector width, spills, address arithmetic.

`make test` compiles for sm_90, `make test-all` for sm_80, sm_100 and gfx942 as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from tests.kernels.compile_kernels import (
    ADAMW_KERNELS,
    ADAMW_PAIRS,
    AMD,
    FLATTENS,
    KERNELS,
    MEASURED_PAIRS,
    MOVERS,
    NVIDIA,
    PAIRS,
    SHAPES,
    SUM_TYPES,
    fits,
)
from tests.kernels.ptx import narrow_products_in_addresses
from tests.patience import patience
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]


PARTS = 2  # processes that share the work


def compilations(what: str, architecture: int | str) -> list[dict[str, object]]:
    """Return what the program prints, run in processes without the interpreter."""

    def printed(part: int) -> list[dict[str, object]]:
        done = subprocess.run(
            [python, "-m", "tests.kernels.compile_kernels", what, str(architecture), str(part), str(PARTS)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience(240),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    python = warm_python()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    with ThreadPoolExecutor(PARTS) as pool:
        return list(chain.from_iterable(pool.map(printed, range(PARTS))))


class Compiled:
    """Every compilation in the shape that is in use, by kernel, architecture and the two dtypes.

    An architecture is compiled when a test asks for it first, since `make test` asks for one of them only.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._targets: dict[int | str, dict[tuple[str, str, str], dict[str, object]]] = {}

    def target(self, architecture: int | str) -> dict[tuple[str, str, str], dict[str, object]]:
        if architecture not in self._targets:
            self._targets[architecture] = {
                (str(row["kernel"]), str(row["dtype"]), str(row["wire"])): row
                for row in compilations(self.what, architecture)
            }
        return self._targets[architecture]

    def __getitem__(self, key: tuple[str, int | str, str, str]) -> dict[str, object]:
        kernel, architecture, dtype, wire = key
        return self.target(architecture)[kernel, dtype, wire]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled("copies")


@pytest.fixture(scope="module")
def shaped() -> list[dict[str, object]]:
    """Every shape that is measured on a GPU, for sm_90."""
    return compilations("shapes", 90)


def targets(*architectures: int | str) -> pytest.MarkDecorator:
    """Compile for each of these; `make test` compiles for sm_90 only, `make test-all` for all of them."""
    return pytest.mark.parametrize(
        "architecture", [each if each == 90 else pytest.param(each, marks=pytest.mark.slow) for each in architectures]
    )


every_copy = pytest.mark.parametrize(
    ("kernel", "dtype", "wire"),
    [(kernel, *pair) for kernel in (*MOVERS, *FLATTENS) for pair in PAIRS if fits(kernel, *pair)],
)
every_mover = pytest.mark.parametrize("kernel", [*MOVERS, "flatten count"])
every_compilation = pytest.mark.parametrize(
    ("kernel", "dtype", "wire"),
    [(kernel, dtype, wire) for kernel in KERNELS for dtype, wire in PAIRS if fits(kernel, dtype, wire)],
)
every_nvidia = targets(*NVIDIA)
every_amd = targets(*AMD)
every_architecture = targets(*NVIDIA, *AMD)

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
WARP = {80: 32, 90: 32, 100: 32, "gfx942": 64}
WIDE_NVIDIA = r"{}\.global(?:\.[\w:]+)*\.(?:v4\.b32|v2\.b64|v8\.b32|v4\.b64|b128)"
WIDE_AMD = r"(?:buffer|global)_{}_dwordx4"


def accesses(row: dict[str, object], dtype: str) -> int:
    """How many 16-byte instructions move one thread's part of a full chunk."""
    chunk, warps = row["shape"]
    return chunk * BYTES[dtype] // (warps * WARP[row["architecture"]]) // 16


@every_copy
@every_nvidia
def test_aligned_chunks_move_128_bits_at_a_time_on_nvidia(
    compiled: Compiled, kernel: str, architecture: int, dtype: str, wire: str
) -> None:
    row = compiled[kernel, architecture, dtype, wire]
    assembly = str(row["assembly"])
    source, target = (dtype, wire) if kernel.startswith("flatten") else (wire, dtype)
    # The whole chunk, not just some of it, goes through 16-byte instructions.
    loads = len(re.findall(WIDE_NVIDIA.format("ld"), assembly))
    stores = len(re.findall(WIDE_NVIDIA.format("st"), assembly))
    old = accesses(row, target) if "accumulate" in kernel else 0
    errors = accesses(row, "float32") if kernel.endswith("residual") else 0
    assert loads == accesses(row, source) + old + errors
    assert stores == accesses(row, target) + errors
    # Eight elements under a condition of their own: a tensor shorter than a chunk goes this way too.
    conditions = re.findall(rf"@(%p\d+) (?:{WIDE_NVIDIA.format('(?:ld|st)')})", assembly)
    assert len(conditions) == loads + stores
    assert len(set(conditions)) >= min(accesses(row, source), accesses(row, target))


@every_copy
@every_amd
def test_aligned_chunks_move_128_bits_at_a_time_on_amd(
    compiled: Compiled, kernel: str, architecture: str, dtype: str, wire: str
) -> None:
    row = compiled[kernel, architecture, dtype, wire]
    assembly = str(row["assembly"])
    source, target = (dtype, wire) if kernel.startswith("flatten") else (wire, dtype)
    loads = len(re.findall(WIDE_AMD.format("load"), assembly))
    stores = len(re.findall(WIDE_AMD.format("store"), assembly))
    assert loads >= max(1, accesses(row, source))
    assert stores >= max(1, accesses(row, target))


@pytest.mark.parametrize("kernel", ["squared_norm", "multiply"])
@every_architecture
@pytest.mark.parametrize("dtype", BYTES)
def test_what_only_measures_or_scales_moves_128_bits_at_a_time(
    compiled: Compiled, kernel: str, architecture: int | str, dtype: str
) -> None:
    row = compiled[kernel, architecture, dtype, dtype]
    assembly = str(row["assembly"])
    if architecture in NVIDIA:
        loads = len(re.findall(WIDE_NVIDIA.format("ld"), assembly))
        stores = len(re.findall(WIDE_NVIDIA.format("st"), assembly))
        assert (loads, stores) == (accesses(row, dtype), accesses(row, dtype) if kernel == "multiply" else 0)
    else:
        assert len(re.findall(WIDE_AMD.format("load"), assembly)) >= max(1, accesses(row, dtype))
        assert len(re.findall(WIDE_AMD.format("store"), assembly)) >= (kernel == "multiply")


@every_nvidia
def test_no_sum_depends_on_which_program_is_first(compiled: Compiled, architecture: int) -> None:
    # Integers may be added in any order; floats have a place for each program.
    for (kernel, _, _), row in compiled.target(architecture).items():
        assert not re.search(r"\b(?:atom|red)\.\S*\.(?:f16|bf16|f32|f64)\b", str(row["assembly"])), kernel
        counts = bool(re.search(r"\b(?:atom|red)\.\S*\.[su]32\b", str(row["assembly"])))
        assert counts == (kernel == "flatten count")


@every_architecture
@every_compilation
def test_nothing_spills(compiled: Compiled, kernel: str, architecture: int | str, dtype: str, wire: str) -> None:
    assert compiled[kernel, architecture, dtype, wire]["spilled"] == 0


@pytest.mark.slow
def test_every_shape_that_is_measured_is_wide_and_spills_nothing(shaped: list[dict[str, object]]) -> None:
    assert len(shaped) == len(SHAPES) * len(MEASURED_PAIRS) * 2
    for row in shaped:
        source, target = (row["dtype"], row["wire"]) if row["kernel"] == "flatten" else (row["wire"], row["dtype"])
        loads = len(re.findall(WIDE_NVIDIA.format("ld"), str(row["assembly"])))
        stores = len(re.findall(WIDE_NVIDIA.format("st"), str(row["assembly"])))
        assert (loads, stores) == (accesses(row, str(source)), accesses(row, str(target))), {**row, "assembly": ""}
        assert row["spilled"] == 0, {**row, "assembly": ""}


@every_nvidia
@every_compilation
def test_no_32_bit_product_feeds_an_address(
    compiled: Compiled, kernel: str, architecture: int, dtype: str, wire: str
) -> None:
    assembly = str(compiled[kernel, architecture, dtype, wire]["assembly"])
    assert not narrow_products_in_addresses(assembly)
    assert not re.findall(r"\bshl\.b32[^\n]*;\n[^\n]*cvt\.[su]64\.[su]32", assembly)


@every_mover
@every_nvidia
def test_float64_is_multiplied_by_all_64_bits_of_the_factor(compiled: Compiled, kernel: str, architecture: int) -> None:
    row = compiled[kernel, architecture, "float64", "float64"]
    assembly = str(row["assembly"])
    products = re.findall(r"mul(?:\.rn)?\.f64\s+%\w+, (%\w+), (%\w+);", assembly)
    chunk, warps = row["shape"]
    each = chunk // (warps * 32)
    assert len(products) == each + each // 4, "one per element; the other path does a quarter of a chunk at a time"
    # The argument itself is a factor of each product; nothing here is ever a 32-bit float.
    argument = re.search(r"ld\.param\.b64\s+(%\w+), \[\w+_param_3\]", assembly)
    assert argument is not None
    assert all(argument[1] in factors for factors in products)
    assert ".f32" not in assembly


@every_copy
@every_nvidia
def test_products_are_rounded_before_anything_is_added(
    compiled: Compiled, kernel: str, architecture: int, dtype: str, wire: str
) -> None:
    # sm_80 has no bfloat16 addition and does it as a fused multiply-add with one, which is exact.
    assert not re.search(r"\bfma\.\w+\.(?!bf16)", str(compiled[kernel, architecture, dtype, wire]["assembly"]))


@every_nvidia
@pytest.mark.parametrize("kernel", [*MOVERS, *FLATTENS, "multiply"])
def test_bfloat16_is_rounded_to_nearest(compiled: Compiled, kernel: str, architecture: int) -> None:
    row = compiled[kernel, architecture, "bfloat16", "bfloat16"]
    assert re.search(r"cvt\.rn\.bf16(?:x2)?\.f32", str(row["assembly"]))


every_sum = pytest.mark.parametrize("dtype", SUM_TYPES)


@every_sum
@every_architecture
def test_parts_are_added_up_128_bits_at_a_time_without_spills(
    compiled: Compiled, architecture: int | str, dtype: str
) -> None:
    row = compiled["sum_parts", architecture, dtype, dtype]
    assembly = str(row["assembly"])
    per_row = accesses(row, dtype)
    if architecture in AMD:
        assert len(re.findall(WIDE_AMD.format("load"), assembly)) >= 2 * max(1, per_row)
        assert len(re.findall(WIDE_AMD.format("store"), assembly)) >= max(1, per_row)
    else:
        # The first part, and the one that the loop is at.
        assert len(re.findall(WIDE_NVIDIA.format("ld"), assembly)) == 2 * per_row
        assert len(re.findall(WIDE_NVIDIA.format("st"), assembly)) == per_row
    assert row["spilled"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_nvidia
def test_what_rounding_takes_from_a_sum_is_kept_128_bits_at_a_time(
    compiled: Compiled, architecture: int, dtype: str
) -> None:
    row = compiled["sum_parts residual", architecture, dtype, dtype]
    assembly = str(row["assembly"])
    errors = accesses(row, "float32")
    assert len(re.findall(WIDE_NVIDIA.format("ld"), assembly)) == 2 * accesses(row, dtype) + errors
    assert len(re.findall(WIDE_NVIDIA.format("st"), assembly)) == accesses(row, dtype) + errors
    assert not re.search(r"\bfma\.\w+\.(?!bf16)", assembly)
    assert row["spilled"] == 0


@every_sum
@every_nvidia
def test_parts_are_added_up_in_full_precision_at_64_bit_addresses(
    compiled: Compiled, architecture: int, dtype: str
) -> None:
    row = compiled["sum_parts", architecture, dtype, dtype]
    assembly = str(row["assembly"])
    chunk, warps = row["shape"]
    wide = "f64" if SUM_TYPES[dtype] == "float64" else "f32"
    # One addition per element, in the loops of both paths, in the wide type and in no other.
    additions = re.findall(r"\badd(?:\.rn)?\.(f16x2|f16|bf16x2|bf16|f32x2|f32|f64)\b", assembly)
    assert sum(2 if kind.endswith("x2") else 1 for kind in additions) == 2 * chunk // (warps * 32)
    assert {kind.removesuffix("x2") for kind in additions} == {wide}
    assert not re.search(r"\bfma\.", assembly)
    assert not narrow_products_in_addresses(assembly)
    assert not re.findall(r"\bshl\.b32[^\n]*;\n[^\n]*cvt\.[su]64\.[su]32", assembly)


every_adamw = pytest.mark.parametrize(
    ("kernel", "dtype", "wire"), [(kernel, *pair) for kernel in ADAMW_KERNELS for pair in ADAMW_PAIRS]
)


@every_adamw
@every_architecture
def test_a_step_of_adamw_moves_128_bits_at_a_time_without_spills(
    compiled: Compiled, kernel: str, architecture: int | str, dtype: str, wire: str
) -> None:
    row = compiled[kernel, architecture, dtype, wire]
    assembly = str(row["assembly"])
    loads = accesses(row, wire) + 3 * accesses(row, "float32")  # the gradient, the value and two averages
    stores = 3 * accesses(row, "float32") + (0 if dtype == "float32" else accesses(row, dtype))
    if architecture in AMD:
        # A thread has half as many elements there. Those of 16 bits make a load or store of 64 bits.
        assert len(re.findall(WIDE_AMD.format("load"), assembly)) >= loads
        assert len(re.findall(WIDE_AMD.format("store"), assembly)) >= stores
    else:
        assert len(re.findall(WIDE_NVIDIA.format("ld"), assembly)) == loads
        assert len(re.findall(WIDE_NVIDIA.format("st"), assembly)) == stores
        # Two programs fit into the 65536 registers of a multiprocessor: one computes while the other waits for memory.
        assert row["registers"] <= 65536 // (2 * 32 * row["shape"][1])
    assert row["spilled"] == 0


@every_adamw
@every_nvidia
def test_a_step_of_adamw_rounds_each_operation_at_64_bit_addresses(
    compiled: Compiled, kernel: str, architecture: int, dtype: str, wire: str
) -> None:
    row = compiled[kernel, architecture, dtype, wire]
    assembly = str(row["assembly"])
    chunk, warps = row["shape"]
    each = 2 * chunk // (warps * 32)  # elements of a thread, on both paths
    assert len(re.findall(r"\bdiv\.rn\.f32\b", assembly)) == 2 * each
    assert len(re.findall(r"\bsqrt\.rn\.f32\b", assembly)) == each
    assert not re.search(r"\b(?:div|sqrt|rcp)\.(?!rn\.f32)", assembly)
    assert not re.search(r"\bfma\.", assembly)
    assert ".ftz" not in assembly
    assert ".f64" not in assembly
    assert not narrow_products_in_addresses(assembly)
    assert not re.findall(r"\bshl\.b32[^\n]*;\n[^\n]*cvt\.[su]64\.[su]32", assembly)
