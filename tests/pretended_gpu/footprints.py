"""The bytes that a launch of one of our kernels may read and write, from its raw arguments and the tables in memory.

A kernel does nothing on the pretended device, so nobody sees its loads and stores. Device memory is host memory there:
the tables that a kernel would read are read here, at the launch. tests/kernels/test_footprints.py compares with what
Triton's interpreter really loads and stores. A new kernel needs a function here.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FOOTPRINTS", "footprint"]

WORD = 8  # bytes of a number in a table
PAIRS_OF_A_HASH = 32
BLOCK, BLOCKS, SUPER_BYTES = 32, 16, 528  # elements of a block; blocks of a super-block, and its bytes

Numbers: TypeAlias = NDArray[np.int64]
Spans: TypeAlias = list[tuple[Any, Any]]  # addresses and bytes, each a number or an array
Constants: TypeAlias = Mapping[str, Any]
Arguments: TypeAlias = Mapping[str, Any]


def footprint(
    kernel: str, constants: Constants, arguments: Mapping[str, int | float], programs: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return what a launch reads and what it writes, as (address, bytes), ascending and with nothing adjacent.

    A write that depends on values counts as if it were made: spoiling, a count, a product with a factor that may be 1.
    An atomic addition is a write. Of a row of a table with a number that the kernel leaves out, the whole row is read.

    Args:
        kernel: the name of its function, as `_flatten_kernel`.
        constants: its compile-time arguments by name; types of Triton, or their names.
        arguments: the others by name, pointers as addresses.
        programs: of the grid.

    Raises:
        KeyError: The kernel is unknown.
    """
    find = FOOTPRINTS[kernel]
    if not programs:
        return [], []
    reads, writes = find(constants, arguments, programs)
    return merged(reads), merged(writes)


def merged(spans: Spans) -> list[tuple[int, int]]:
    """Return the same bytes in as few ranges as possible, ascending.

    Example:
        >>> merged([(8, 4), (np.array([0, 12, 20]), 4), (30, 0)])
        [(0, 4), (8, 8), (20, 4)]
    """
    arrays = [(start, start + length) for start, length in spans if isinstance(start, np.ndarray)]
    numbers = [(start, start + length) for start, length in spans if not isinstance(start, np.ndarray)]
    first, last = np.array(numbers, np.int64).reshape(-1, 2).T
    start = np.concatenate([first, *[one for one, _ in arrays]])
    end = np.concatenate([last, *[one for _, one in arrays]])
    order = start.argsort(kind="stable")
    order = order[(end > start)[order]]
    if not len(order):
        return []
    start, end = start[order], np.maximum.accumulate(end[order])
    apart = (start[1:] > end[:-1]).nonzero()[0]
    begin = np.concatenate((start[:1], start[apart + 1]))
    size = np.concatenate((end[apart], end[-1:])) - begin
    return list(zip(begin.tolist(), size.tolist(), strict=True))


def bytes_of(kind: Any) -> int:
    """Return the size of a type of Triton, which may also be given by its name.

    Example:
        >>> bytes_of("fp32"), bytes_of("bfloat16")
        (4, 2)
    """
    bits = getattr(kind, "primitive_bitwidth", None)
    if bits is None:
        digits = re.search(r"\d+", str(kind))
        if digits is None:
            raise ValueError(f"{kind!r} is no type with a number of bits, expected one such as 'fp32'.")
        bits = int(digits.group())
    return int(bits) // 8


def numbers_at(address: int, count: int) -> Numbers:
    """Return a view of int64 in memory."""
    return np.frombuffer(memoryview((ctypes.c_int64 * count).from_address(address)), np.int64)


class _Chunks(NamedTuple):
    """What the tables say to some programs."""

    reads: Spans  # the tables themselves
    tensor: Numbers
    address: Numbers  # of the whole tensor; 0 where there is none
    start: Numbers
    length: Numbers
    offset: Numbers  # where the rows have four numbers

    @property
    def present(self) -> NDArray[np.bool_]:
        return self.address.astype(np.bool_)

    def in_tensors(self, size: int) -> Spans:
        """The chunks of tensors that are there, with elements of `size` bytes."""
        present = self.present
        return [((self.address + self.start * size)[present], (self.length * size)[present])]

    def in_flat(self, flat: int, size: int, some: NDArray[np.bool_] | None = None) -> Spans:
        """The places of these chunks in a buffer with elements of `size` bytes; only `some` of them."""
        place, length = flat + self.offset * size, self.length * size
        return [(place, length)] if some is None else [(place[some], length[some])]

    def in_blocks(self, flat: int, some: NDArray[np.bool_] | None = None) -> Spans:
        """The places of these chunks in a buffer of eight-bit blocks."""
        first, count = self.offset // BLOCK, -(-self.length // BLOCK)
        return blocks_at(flat, first, count) if some is None else blocks_at(flat, first[some], count[some])


def chunks_at(rows: int, addresses: int, first: int, programs: int, width: int = 4) -> _Chunks:
    """Read the rows of these programs, each of `width` numbers, and the addresses of their tensors."""
    rows += first * width * WORD
    table = numbers_at(rows, programs * width).reshape(-1, width)
    tensor, start, length = table[:, 0], table[:, 1], table[:, 2]
    address = numbers_at(addresses, int(tensor.max()) + 1)[tensor]
    reads: Spans = [(rows, programs * width * WORD), (addresses + tensor * WORD, WORD)]
    return _Chunks(reads, tensor, address, start, length, table[:, -1])


def table_of(arguments: Arguments, programs: int) -> _Chunks:
    """Read the tables of a kernel that `Launcher` launches."""
    return chunks_at(arguments["chunk_ptr"], arguments["address_ptr"], arguments["first_program"], programs)


def blocks_at(flat: int, first: Any, count: Any) -> Spans:
    """Return where blocks lie: of a whole super-block all bytes, of a part its element bytes and its scale bytes.

    Example:
        >>> merged(blocks_at(1000, 1, 2)), merged(blocks_at(1000, 16, 33))
        ([(1032, 64), (1513, 2)], [(1528, 1088), (3096, 1)])
    """
    spans: list[tuple[int, int]] = []
    for block, blocks in merged([(first, count)]):
        end = block + blocks
        while block < end:
            base, inside = flat + block // BLOCKS * SUPER_BYTES, block % BLOCKS
            if not inside and end - block >= BLOCKS:
                whole = (end - block) // BLOCKS
                spans.append((base, whole * SUPER_BYTES))
                block += whole * BLOCKS
            else:
                part = min(end - block, BLOCKS - inside)
                spans += [(base + inside * BLOCK, part * BLOCK), (base + BLOCKS * BLOCK + inside, part)]
                block += part
    pairs = np.array(spans, np.int64).reshape(-1, 2)
    return [(pairs[:, 0], pairs[:, 1])]


def _flatten(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    chunks = table_of(arguments, programs)
    wire, flat = bytes_of(constants["WIRE"]), arguments["flat_address"]
    count, residual, accumulate = constants["COUNT"], constants["RESIDUAL"], constants["ACCUMULATE"]
    packed = chunks.present | bool(residual)  # the others are zeros, or stay as they are
    reads = chunks.reads + chunks.in_tensors(bytes_of(constants["TENSOR"]))
    writes = chunks.in_flat(flat, wire, packed if accumulate else None)
    if accumulate:
        reads += chunks.in_flat(flat, wire, None if count else packed)
    if constants["FACTOR"] and packed.any():
        reads.append((arguments["factor_address"], 4))
    if residual:
        errors = chunks.in_flat(arguments["residual_address"], 4)
        reads, writes = reads + errors, writes + errors
    if count:
        counted = chunks.tensor if accumulate else chunks.tensor[packed]
        writes.append((arguments["counts_address"] + counted * 4, 4))
    return reads, writes


def _unflatten(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    chunks = table_of(arguments, programs)
    wire, flat = bytes_of(constants["WIRE"]), arguments["flat_address"]
    # What is aligned is read before the address is looked at.
    aligned = (chunks.length % 8 == 0) & ((flat + chunks.offset * wire) % 16 == 0)
    reads = chunks.reads + chunks.in_flat(flat, wire, chunks.present | aligned)
    return reads, chunks.in_tensors(bytes_of(constants["TENSOR"]))


def _multiply(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    # With a factor of 1 no tensor is touched. But the next step may have another factor.
    chunks = table_of(arguments, programs)
    size = bytes_of(constants["TENSOR"])
    tensors = chunks.in_tensors(size)
    return [*chunks.reads, *tensors, (arguments["factor_address"], 8 if size == 8 else 4)], tensors


def _squared_norm(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    chunks = table_of(arguments, programs)
    size = bytes_of(constants["TENSOR"])
    sum_bytes = 8 if size == 8 else 4
    sums = arguments["sums_address"] + arguments["first_program"] * sum_bytes
    return chunks.reads + chunks.in_tensors(size), [(sums, programs * sum_bytes)]


def _quantize(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    chunks = table_of(arguments, programs)
    reads = chunks.reads + chunks.in_tensors(bytes_of(constants["TENSOR"]))
    writes = chunks.in_blocks(arguments["flat_address"])
    if constants["FACTOR"]:
        reads.append((arguments["factor_address"], 4))
    if constants["RESIDUAL"]:  # whole blocks; the bytes after the tensor are written as they were read
        errors = (arguments["residual_address"] + chunks.offset * 4, -(-chunks.length // BLOCK) * BLOCK * 4)
        reads.append(errors)
        writes.append(errors)
    if constants["COUNT"]:
        counted = chunks.tensor if constants["RESIDUAL"] else chunks.tensor[chunks.present]
        writes.append((arguments["counts_address"] + counted * 4, 4))
    return reads, writes


def _dequantize(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    chunks = table_of(arguments, programs)
    reads = chunks.reads + chunks.in_blocks(arguments["flat_address"], chunks.present)
    return reads, chunks.in_tensors(bytes_of(constants["TENSOR"]))


def _spoil(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    # The tensors are written if a pair says so, which may happen in any step: here they always are. All programs
    # together fill all chunks, however few they are.
    chunks = chunks_at(arguments["chunk_ptr"], arguments["address_ptr"], 0, arguments["chunks"], width=3)
    pair = bytes_of(constants["PAIR"])
    copied = arguments["copied"] * pair
    reads = [*chunks.reads, (arguments["pair_address"], arguments["pairs"] * 2 * pair)]
    writes = chunks.in_tensors(bytes_of(constants["TENSOR"]))
    return [*reads, (arguments["from_address"], copied)], [*writes, (arguments["to_address"], copied)]


def _bit_hash(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    # The rows are in bytes. One of the programs, the last, writes the pairs.
    chunks = chunks_at(arguments["row_ptr"], arguments["address_ptr"], arguments["first_row"], programs, width=3)
    pairs = (arguments["pair_address"], 2 * PAIRS_OF_A_HASH * bytes_of(constants["PAIR"]))
    return chunks.reads + chunks.in_tensors(1), [(arguments["state_address"], 8), pairs]


def span_of(arguments: Arguments, programs: int, per_program: int, total: int) -> tuple[int, int]:
    """Return the first place of these programs, and how many of `total` places are theirs."""
    first = arguments["first_program"] * per_program
    return first, max(0, min(total - first, programs * per_program))


def _sum_parts(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    numel, size = arguments["numel"], bytes_of(constants["WIRE"])
    first, count = span_of(arguments, programs, constants["CHUNK"], numel)
    rows = np.arange(max(1, arguments["count"]))  # the first row is added up in any case
    reads: Spans = [(arguments["parts_address"] + (rows * numel + first) * size, count * size)]
    writes: Spans = [(arguments["out_address"] + first * size, count * size)]
    if constants["RESIDUAL"]:
        errors = (arguments["residual_address"] + first * 4, count * 4)
        reads.append(errors)
        writes.append(errors)
    return reads, writes


def _sum_quantized(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    blocks = arguments["blocks"]
    first, count = span_of(arguments, programs, constants["CHUNK"] // BLOCK, blocks)
    (place, size), stride = blocks_at(0, first, count)[0], blocks // BLOCKS * SUPER_BYTES
    reads: Spans = [
        (arguments["parts_address"] + row * stride + place, size) for row in range(max(1, arguments["count"]))
    ]
    writes: Spans = [(arguments["out_address"] + place, size)]
    if constants["RESIDUAL"]:
        errors = (arguments["residual_address"] + first * BLOCK * 4, count * BLOCK * 4)
        reads.append(errors)
        writes.append(errors)
    return reads, writes


def _adamw(constants: Constants, arguments: Arguments, programs: int) -> tuple[Spans, Spans]:
    first, count = span_of(arguments, programs, constants["CHUNK"], arguments["numel"])

    def part(name: str, size: int = 4) -> tuple[int, int]:
        return arguments[f"{name}_address"] + first * size, count * size

    param = part("param", bytes_of(constants["PARAM"]))
    states = [part("exp_avg"), part("exp_avg_sq"), part("master") if constants["MASTER"] else param]
    factor = [(arguments["factor_address"], 4)] if constants["FACTOR"] else []
    # With a master, the parameter is its rounded copy, which is written and not read.
    return [part("grad", bytes_of(constants["WIRE"])), *states, *factor], [param, *states]


FOOTPRINTS: dict[str, Callable[[Constants, Arguments, int], tuple[Spans, Spans]]] = {
    "_flatten_kernel": _flatten,
    "_unflatten_kernel": _unflatten,
    "_multiply_kernel": _multiply,
    "_squared_norm_kernel": _squared_norm,
    "_quantize_kernel": _quantize,
    "_dequantize_kernel": _dequantize,
    "_spoil_kernel": _spoil,
    "_bit_hash_kernel": _bit_hash,
    "_sum_parts_kernel": _sum_parts,
    "_sum_quantized_kernel": _sum_quantized,
    "_adamw_kernel": _adamw,
}
