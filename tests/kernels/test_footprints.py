"""The footprints of tests/pretended_gpu: they have each byte that the interpreter loads and stores, and no other.

Each case launches a kernel twice over the same memory: with values that make it write all that it can, and with values
that do not. Both footprints are the bytes of both launches.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import dpfuse_kernels
from dpfuse_kernels import SpoilTable, adamw_step, launcher
from dpfuse_kernels.bit_hash import BitHashTable, Piece
from dpfuse_kernels.dequantize import dequantize
from dpfuse_kernels.flatten import flatten
from dpfuse_kernels.multiply import multiply
from dpfuse_kernels.quantize import quantize
from dpfuse_kernels.spoil import spoil
from dpfuse_kernels.squared_norm import squared_norm
from dpfuse_kernels.sum_parts import sum_parts
from dpfuse_kernels.sum_quantized import sum_quantized
from dpfuse_kernels.unflatten import unflatten
from tests.kernels.layouts import guarded
from tests.kernels.test_bit_hash import kernel as bit_hash
from tests.kernels.test_quantize import table_of
from tests.pretended_gpu.footprints import FOOTPRINTS, bytes_of, footprint

CPU = torch.device("cpu")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NUMELS = (1, 8, 1100, 0, 1024, 33, 1032, 16)  # two of them take two chunks
ABSENT = (1, 4)  # their places
LOUD, QUIET = float("inf"), 0.0  # a count grows with the first only
TABLES = ("chunk_ptr", "row_ptr")  # of chunks

Bytes = np.ndarray  # addresses, ascending, each once
Ranges = list[tuple[int, int]]


@dataclass
class Launch:
    """One launch: its raw arguments, what its footprint says, and what it did."""

    kernel: str
    constants: dict[str, Any]
    arguments: dict[str, Any]
    programs: int
    says: tuple[Ranges, Ranges]
    loads: list[Bytes] = field(default_factory=list)
    stores: list[Bytes] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # those among the arguments, which are kept

    def footprint(self, **constants: Any) -> tuple[Ranges, Ranges]:
        return footprint(self.kernel, {**self.constants, **constants}, self.arguments, self.programs)


class Watch:
    """Takes down launches; of each, if `leaves_out` says so, only from the second program on or all but the last."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.leaves_out = ""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dispatch, builder = launcher.dispatch, InterpreterBuilder
        load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

        def watched(kernel: Any, device: Any, programs: int, values: Sequence[Any], constants: Any, warps: int) -> Any:
            names = list(inspect.signature(kernel).parameters)[: len(values)]
            given = dict(zip(names, values, strict=True))
            first = next((name for name in ("first_program", "first_row") if name in given), None)
            if self.leaves_out and first is not None and programs > 1:
                programs -= 1
                given[first] += self.leaves_out == "first"
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            raw = given | {name: tensor.data_ptr() for name, tensor in tensors.items()}
            says = footprint(kernel.__name__, constants, raw, programs)
            self.launches.append(Launch(kernel.__name__, constants, raw, programs, says, tensors=tensors))
            return dispatch(kernel, device, programs, list(given.values()), constants, warps)

        def watched_load(self_: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
            self.launches[-1].loads.append(reached(ptrs, mask))
            return load(self_, ptrs, mask, *others)

        def watched_store(self_: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
            self.launches[-1].stores.append(reached(ptrs, mask))
            return store(self_, ptrs, value, mask, *others)

        def watched_add(self_: Any, operation: Any, ptr: Any, value: Any, mask: Any, *others: Any) -> Any:
            self.launches[-1].stores.append(reached(ptr, mask))
            return add(self_, operation, ptr, value, mask, *others)

        def unknown(*arguments: Any) -> None:
            raise AssertionError("This access is not taken down. Watch it, too.")

        monkeypatch.setattr(launcher, "dispatch", watched)
        monkeypatch.setattr(builder, "create_masked_load", watched_load)
        monkeypatch.setattr(builder, "create_masked_store", watched_store)
        monkeypatch.setattr(builder, "create_atomic_rmw", watched_add)
        for name in ("create_atomic_cas", "create_descriptor_load", "create_descriptor_store"):
            monkeypatch.setattr(builder, name, unknown, raising=False)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    found = Watch()
    found.patch(monkeypatch)
    yield found
    found.launches.clear()


def reached(ptrs: Any, mask: Any) -> Bytes:
    """The bytes of an access in the interpreter."""
    first = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64).reshape(-1, 1)
    places: Bytes = first + np.arange(ptrs.get_element_ty().primitive_bitwidth // 8)
    return places.ravel()


def union(parts: Sequence[Bytes]) -> Bytes:
    return np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))


def bytes_in(ranges: Ranges) -> Bytes:
    return union([np.arange(start, start + length) for start, length in ranges])


def rows_of(launch: Launch, touched: Bytes) -> tuple[Bytes, Bytes]:
    """The rows of the table of chunks that are among these bytes, and the other bytes."""
    table = next((launch.tensors[name] for name in TABLES if name in launch.tensors), None)
    if table is None:
        return touched[:0], touched
    inside = (touched >= table.data_ptr()) & (touched < table.data_ptr() + table.nbytes)
    return np.unique((touched[inside] - table.data_ptr()) // table[0].nbytes), touched[~inside]


def check(launches: Sequence[Launch]) -> None:
    """Is what the footprints of equal launches say what they did, all together?"""
    reads, writes = launches[0].says
    assert all(launch.says == (reads, writes) for launch in launches)
    for said in (reads, writes):
        assert said == sorted(said)
        assert all(start + length < after for (start, length), (after, _) in pairwise(said))
    stored = union([part for launch in launches for part in launch.stores])
    assert np.array_equal(bytes_in(writes), stored)
    loaded = union([part for launch in launches for part in launch.loads])
    assert len(np.setdiff1d(loaded, bytes_in(reads))) == 0
    # Kernels leave out some numbers of a row; a footprint has whole rows.
    for some, all_of_them in zip(rows_of(launches[0], loaded), rows_of(launches[0], bytes_in(reads)), strict=True):
        assert np.array_equal(some, all_of_them)


def alike(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Groups of launches with the same raw arguments."""
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        key = f"{launch.kernel} {launch.constants} {launch.arguments} {launch.programs}"
        groups.setdefault(key, []).append(launch)
    return list(groups.values())


def tensors_of(dtype: torch.dtype, shift: int) -> list[Tensor]:
    return [torch.zeros(numel + shift, dtype=dtype)[shift:] for numel in NUMELS]


def some_absent(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if index in ABSENT else tensor for index, tensor in enumerate(tensors)]


def flatten_case(dtype: torch.dtype, wire: torch.dtype, shift: int, own: bool = False, **given: Any) -> None:
    buffer = guarded(tensors_of(dtype, 0), dtype, wire, shift=shift, gap=3)
    tensors = list(buffer.table.views) if own else tensors_of(dtype, shift)
    sizes = {"counts": len(NUMELS), "residual": buffer.table.flat.numel() + shift, "factor": 1}
    beside: dict[str, Any] = {
        name: torch.zeros(size, dtype=torch.int32 if name == "counts" else F32)
        for name, size in sizes.items()
        if given.pop(name, False)
    }
    if "factor" in beside:
        beside["factor"] = beside["factor"][0].fill_(0.5)
    if "residual" in beside:
        beside["residual"] = beside["residual"][shift:]
    for value in (LOUD, QUIET):
        for memory in (buffer.memory, beside.get("residual"), *tensors):
            if memory is not None:
                memory.fill_(value)
        flatten(some_absent(tensors), buffer.table, **beside, **given)


def unflatten_case(dtype: torch.dtype, wire: torch.dtype, flat_shift: int, shift: int, scale: float = 1.0) -> None:
    buffer = guarded(tensors_of(dtype, 0), dtype, wire, shift=flat_shift, gap=3)
    unflatten(buffer.table, some_absent(tensors_of(dtype, shift)), scale=scale)


def multiply_case(dtype: torch.dtype, shift: int) -> None:
    table = guarded(tensors_of(dtype, 0), dtype, dtype).table
    tensors, factor = some_absent(tensors_of(dtype, shift)), torch.tensor(0.5, dtype=F64 if dtype == F64 else F32)
    multiply(tensors, table, factor)
    multiply(tensors, table, factor.fill_(1.0))


def squared_norm_case(dtype: torch.dtype, shift: int) -> None:
    squared_norm(some_absent(tensors_of(dtype, shift)), guarded(tensors_of(dtype, 0), dtype, dtype).table)


def quantize_case(dtype: torch.dtype, format: torch.dtype, shift: int, **given: Any) -> None:
    table, _ = table_of(tensors_of(dtype, 0), dtype, format, gap=1, spare=1)
    tensors = tensors_of(dtype, shift)
    counts = torch.zeros(len(NUMELS), dtype=torch.int32) if given.pop("counts", False) else None
    factor = torch.tensor(0.5) if given.pop("factor", False) else None
    residual = torch.zeros(table.elements) if given.pop("residual", False) else None
    for value in (LOUD, QUIET):
        for memory in (residual, *tensors):
            if memory is not None:
                memory.fill_(value)
        quantize(some_absent(tensors), table, counts=counts, factor=factor, residual=residual, **given)


def dequantize_case(dtype: torch.dtype, format: torch.dtype, shift: int, scale: float = 1.0) -> None:
    table, _ = table_of(tensors_of(dtype, 0), dtype, format, gap=1, spare=1)
    dequantize(table, some_absent(tensors_of(dtype, shift)), scale=scale)


def spoil_case(dtype: torch.dtype, pair: torch.dtype, programs: int, copied: int = 0, spans: Any = None) -> None:
    table, tensors = SpoilTable(NUMELS, dtype, CPU, chunk=512, spans=spans), some_absent(tensors_of(dtype, 1))
    pairs = torch.zeros(150, 2, dtype=pair)
    copy = (torch.zeros(copied, dtype=pair), torch.zeros(copied, dtype=pair)) if copied else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dpfuse_kernels.spoil"], "PROGRAMS", programs)
        for value in (LOUD, QUIET):
            spoil(table, tensors, pairs.fill_(value).flatten(), copy)


def bit_hash_case(pair: torch.dtype, shift: int) -> None:
    tensors = {index: torch.ones(size + shift, dtype=torch.uint8)[shift:] for index, size in enumerate((77, 4096, 3))}
    pieces = [[Piece(0, 0, 77), Piece(2, 0, 3)], [Piece(1, 1024, 1000), Piece(3, 0, 40), Piece(1, 3000, 1096)]]
    table = BitHashTable([77, 4096, 3, 40], pieces, CPU, chunk=64)
    for group in range(2):
        bit_hash(table, group, tensors, 5, torch.zeros(32, 2, dtype=pair))


def sum_parts_case(rows: int, numel: int, dtype: torch.dtype, shift: int = 0, residual: bool = False) -> None:
    parts = torch.zeros(rows * numel + shift, dtype=dtype)[shift:].view(rows, numel)
    sum_parts(parts, torch.zeros(numel, dtype=dtype), torch.zeros(numel) if residual else None)


def sum_quantized_case(rows: int, super_blocks: int, format: torch.dtype, residual: bool = False) -> None:
    parts = torch.zeros(rows, 528 * super_blocks, dtype=torch.uint8)
    errors = torch.zeros(512 * super_blocks) if residual else None
    sum_quantized(parts, torch.zeros_like(parts[0]), format, errors)


def adamw_case(numel: int, wire: torch.dtype, shift: int, narrow: torch.dtype | None = None, **given: Any) -> None:
    def flat(dtype: torch.dtype = F32) -> Tensor:
        return torch.zeros(numel + shift, dtype=dtype)[shift:]

    if given.pop("factor", False):
        given["factor"] = torch.tensor(0.5)
    master = None if narrow is None else flat()
    adamw_step(flat(wire), flat(narrow or F32), flat(), flat(), step=1, master=master, **given)


SPANS = [[(0, 1)], [(0, 3)], [(3, 700), (900, 1)], [], [(5, 9)], [(32, 1)], [], [(0, 16)]]
CASES: dict[str, Callable[[], Any]] = {
    "flatten": lambda: flatten_case(F32, F16, 0),
    "flatten to odd places": lambda: flatten_case(BF16, F32, 1, scale=0.5),
    "flatten float64": lambda: flatten_case(F64, F64, 0, scale=0.5, counts=True),
    "flatten slots in place": lambda: flatten_case(F32, F32, 0, own=True, scale=0.5),
    "flatten and count": lambda: flatten_case(F16, BF16, 1, counts=True),
    "flatten with a factor": lambda: flatten_case(F32, F32, 0, factor=True),
    "flatten with a residual": lambda: flatten_case(F32, F16, 0, residual=True),
    "flatten with a residual and count": lambda: flatten_case(BF16, BF16, 1, residual=True, counts=True),
    "flatten and add": lambda: flatten_case(F32, F32, 0, accumulate=True, factor=True),
    "flatten and add and count": lambda: flatten_case(F16, F32, 0, accumulate=True, counts=True),
    "flatten with all": lambda: flatten_case(
        BF16, F16, 1, accumulate=True, counts=True, residual=True, factor=True, scale=2.0
    ),
    "unflatten": lambda: unflatten_case(F32, F16, 0, 0),
    "unflatten to odd places": lambda: unflatten_case(F16, F32, 0, 1, scale=0.5),
    "unflatten from odd places": lambda: unflatten_case(F64, BF16, 1, 0),
    "multiply": lambda: multiply_case(F32, 0),
    "multiply at odd places": lambda: multiply_case(BF16, 1),
    "multiply float64": lambda: multiply_case(F64, 0),
    "squared_norm": lambda: squared_norm_case(F32, 0),
    "squared_norm of odd places": lambda: squared_norm_case(F16, 1),
    "squared_norm float64": lambda: squared_norm_case(F64, 0),
    "quantize": lambda: quantize_case(F32, E4M3, 0),
    "quantize and count": lambda: quantize_case(F16, E5M2, 1, counts=True, scale=0.5),
    "quantize with a residual": lambda: quantize_case(F32, E4M3, 0, residual=True, factor=True),
    "quantize with all": lambda: quantize_case(BF16, E4M3, 1, residual=True, factor=True, counts=True),
    "dequantize": lambda: dequantize_case(F32, E4M3, 0),
    "dequantize to odd places": lambda: dequantize_case(BF16, E5M2, 1, scale=0.5),
    "spoil": lambda: spoil_case(F32, F32, 1024),
    "spoil with few programs and copy": lambda: spoil_case(BF16, F64, 2, copied=200),
    "spoil spans": lambda: spoil_case(F64, BF16, 3, spans=SPANS),
    "bit_hash": lambda: bit_hash_case(F32, 0),
    "bit_hash of odd places": lambda: bit_hash_case(BF16, 1),
    "sum_parts": lambda: sum_parts_case(3, 8200, F16),
    "sum_parts of odd places": lambda: sum_parts_case(2, 4099, F32, shift=1),
    "sum_parts with a residual": lambda: sum_parts_case(2, 5001, BF16, residual=True),
    "sum_parts of one row": lambda: sum_parts_case(1, 4099, F64),
    "sum_quantized": lambda: sum_quantized_case(3, 9, E4M3),
    "sum_quantized with a residual": lambda: sum_quantized_case(2, 10, E5M2, residual=True),
    "adamw": lambda: adamw_case(4104, F32, 0),
    "adamw of odd places": lambda: adamw_case(2051, F16, 1, factor=True, decoupled=False),
    "adamw with a master": lambda: adamw_case(4104, BF16, 0, narrow=BF16, maximize=True),
    "adamw with all": lambda: adamw_case(5001, F32, 1, narrow=F16, factor=True),
}


def kernel_of(case: str) -> str:
    return f"_{case.split()[0]}_kernel"


@pytest.mark.parametrize("case", CASES)
def test_a_footprint_has_the_bytes_that_the_kernel_reads_and_writes(case: str, watch: Watch) -> None:
    CASES[case]()
    assert {launch.kernel for launch in watch.launches} == {kernel_of(case)}
    for launches in alike(watch.launches):
        check(launches)


PLAIN = {case for case in CASES if " " not in case} - {"spoil"}  # the number of whose programs says nothing


@pytest.mark.parametrize("leaves_out", ["first", "last"])
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith(" residual") or case in PLAIN])
def test_a_launch_of_some_programs_has_their_bytes_alone(case: str, leaves_out: str, watch: Watch) -> None:
    watch.leaves_out = leaves_out
    CASES[case]()
    for launches in alike(watch.launches):
        check(launches)


def test_each_kernel_has_a_footprint_and_a_case() -> None:
    modules = [
        importlib.import_module(f"dpfuse_kernels.{one.name}") for one in pkgutil.iter_modules(dpfuse_kernels.__path__)
    ]
    kernels = {name for module in modules for name in vars(module) if name.startswith("_") and name.endswith("_kernel")}
    assert kernels == set(FOOTPRINTS)
    assert kernels == {kernel_of(case) for case in CASES}


def test_an_unknown_kernel_has_none() -> None:
    with pytest.raises(KeyError):
        footprint("_another_kernel", {}, {}, 1)


def test_a_changed_table_of_addresses_gives_another_footprint(watch: Watch) -> None:
    buffer = guarded([torch.zeros(3), torch.zeros(3)], F32, F32)
    flat, (one, other, third) = buffer.table.address, torch.zeros(3, 10)[:, :3]
    flatten([one, other], buffer.table)
    (launch,) = watch.launches
    check([launch])
    addresses, rows = launch.tensors["address_ptr"], launch.tensors["chunk_ptr"]
    tables = [(table.data_ptr(), table.nbytes) for table in (addresses, rows)]
    for second, places in ((third, (one, third)), (None, (one,))):
        addresses[1] = 0 if second is None else second.data_ptr()
        reads, writes = launch.footprint()
        read = np.setdiff1d(bytes_in(reads), bytes_in(tables))
        assert np.array_equal(read, bytes_in([(place.data_ptr(), 12) for place in places]))
        assert writes == [(flat, 12), (flat + 32, 12)]
        launch.says = reads, writes
        with pytest.raises(AssertionError):
            check([launch])


@pytest.mark.parametrize("wrong", [{"WIRE": "fp16"}, {"TENSOR": "bf16"}, {"ACCUMULATE": True}, {"COUNT": False}])
def test_a_footprint_that_is_wrong_is_noticed(wrong: dict[str, Any], watch: Watch) -> None:
    flatten_case(F32, F32, 0, counts=True)
    check(watch.launches)
    for launch in watch.launches:
        launch.says = launch.footprint(**wrong)
    with pytest.raises(AssertionError):
        check(watch.launches)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "fp64", "uint8"])
def test_types_and_their_names_have_the_same_size(name: str) -> None:
    import triton.language as tl

    long = name.replace("bf", "bfloat").replace("fp", "float")
    kind = getattr(tl, long)
    assert bytes_of(kind) == bytes_of(name) == bytes_of(long) == bytes_of(f"tl.{long}") == kind.primitive_bitwidth // 8


def test_what_has_no_bits_is_no_type() -> None:
    with pytest.raises(ValueError, match="is no type with a number of bits"):
        bytes_of("float")


def test_places_need_more_than_32_bits() -> None:
    arguments = {"parts_address": 1 << 46, "out_address": 1 << 45, "count": 2, "numel": 1 << 33, "first_program": 1}
    reads, writes = footprint("_sum_parts_kernel", {"WIRE": "fp32", "RESIDUAL": False, "CHUNK": 4096}, arguments, 9)
    assert writes == [((1 << 45) + 4 * 4096, 9 * 4 * 4096)]
    assert reads == [((1 << 46) + row * (1 << 35) + 4 * 4096, 9 * 4 * 4096) for row in range(2)]
