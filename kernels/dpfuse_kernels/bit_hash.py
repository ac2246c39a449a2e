"""Hashes the bits of pieces of tensors in one pass, and writes the hash as pairs of numbers. Knows no report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dpfuse_kernels.address_ring import AddressRing
from dpfuse_kernels.arguments import instance, whole
from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.launcher import Dispatcher, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["BITS", "BitHashTable", "Piece", "bit_hash", "bit_hash_reference", "sum_of_words", "write_bits"]

BITS = 32  # of a hash
CHUNK = 2048  # words of 32 bits that a program reads
WARPS = 4
# Odd numbers with bits of no pattern. The first three spread places, tensors and seeds; the others are those with which
# MurmurHash3 mixes 32 bits.
PLACE, TENSOR, SEED = 0x9E3779B1, 0x7FEB352D, 0x2C1B3C6D
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
LOW = 0xFFFFFFFF


class Piece(NamedTuple):
    """A piece of a tensor.

    Args:
        tensor: its place in the list of tensors.
        start: where the piece begins, in bytes; a multiple of 4.
        nbytes: its length in bytes.

    Example:
        >>> from dpfuse_kernels import Piece
        >>> Piece(tensor=0, start=16, nbytes=8)
        Piece(tensor=0, start=16, nbytes=8)
    """

    tensor: int
    start: int
    nbytes: int


def _bit_hash_kernel(
    address_ptr: tl.tensor,  # [tensors] int64
    row_ptr: tl.tensor,  # [rows, 3] int64: tensor, first byte, bytes
    first_row: tl.int64,
    seed: tl.int64,
    state_address: tl.int64,  # [2] int32: sum, programs that have added to it; zeros before and after
    pair_address: tl.int64,  # [32, 2]
    PAIR: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add the hash of one row in program p; the last program writes the sum: bit b becomes the pair (b, 1 - b).

    Words of 32 bits are mixed with their place, and the mixed words are added up modulo 2**32. A last word of less than
    4 bytes is filled with zeros. A tensor at address 0 adds nothing.

    Example: bits of the hash 5 are the pairs (1, 0), (0, 1), (1, 0), and 29 times (0, 1).
    """
    # Every address is computed in 64 bits: a tensor may exceed 2**31 bytes.
    program = tl.program_id(0).to(tl.int64)
    place_ptr = row_ptr + (first_row + program) * 3
    tensor = tl.load(place_ptr)
    start = tl.load(place_ptr + 1)
    nbytes = tl.load(place_ptr + 2).to(tl.int32)
    address = tl.load(address_ptr + tensor)
    sum_ptr = state_address.to(tl.int64).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, CHUNK)
    base = (tensor * 0x7FEB352D + seed * 0x2C1B3C6D).to(tl.uint32)
    total = tl.full([], 0, tl.int32)
    if address != 0:
        source = address + start
        words = nbytes // 4
        if (source % 16 == 0) & (words % 8 == 0):
            # The alignment is known, and the mask keeps groups of eight words whole: 128-bit loads.
            word_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16) + lane
            word = tl.load(word_ptr, mask=lane < words // 8 * 8, other=0).to(tl.uint32, bitcast=True)
        elif source % 4 == 0:
            word_ptr = source.to(tl.pointer_type(tl.int32)) + lane
            word = tl.load(word_ptr, mask=lane < words, other=0).to(tl.uint32, bitcast=True)
        else:
            low_ptr = source.to(tl.pointer_type(tl.uint8)) + 4 * lane
            word = _word(low_ptr, 4 * lane, words * 4)
        place = ((start // 4).to(tl.int32) + lane).to(tl.uint32)
        mixed = _mix(word + place * 0x9E3779B1 + base)
        total += tl.sum(tl.where(lane < words, mixed.to(tl.int32, bitcast=True), 0))
        if nbytes % 4 != 0:
            end = words * 4
            byte = tl.arange(0, 4)
            value = tl.load(source.to(tl.pointer_type(tl.uint8)) + end + byte, mask=end + byte < nbytes, other=0).to(
                tl.int32
            )
            rest = tl.sum(value << (8 * byte)).to(tl.uint32, bitcast=True)
            last = ((start // 4).to(tl.int32) + words).to(tl.uint32)
            total += _mix(rest + last * 0x9E3779B1 + base).to(tl.int32, bitcast=True)
    tl.atomic_add(sum_ptr, total)
    # The program that counts last finds the sums of all others, for each has added before it has counted.
    counted = tl.atomic_add(sum_ptr + 1, 1)
    if counted == tl.num_programs(0) - 1:
        found = tl.atomic_add(sum_ptr, 0)
        bit = tl.arange(0, 32)
        value = (found >> bit) & 1
        pair_ptr = pair_address.to(tl.int64).to(tl.pointer_type(PAIR)) + 2 * bit
        tl.store(pair_ptr, value.to(PAIR))
        tl.store(pair_ptr + 1, (1 - value).to(PAIR))
        tl.store(sum_ptr, 0)
        tl.store(sum_ptr + 1, 0)


def _word(low_ptr: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Read words of 32 bits byte by byte, those before `end`."""
    inside = first < end
    word = tl.load(low_ptr, mask=inside, other=0).to(tl.uint32)
    word |= tl.load(low_ptr + 1, mask=inside, other=0).to(tl.uint32) << 8
    word |= tl.load(low_ptr + 2, mask=inside, other=0).to(tl.uint32) << 16
    word |= tl.load(low_ptr + 3, mask=inside, other=0).to(tl.uint32) << 24
    return word


def _mix(word: tl.tensor) -> tl.tensor:
    """Spread each bit over the whole word; different words stay different."""
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    return word ^ (word >> 16)


class BitHashTable:
    """The pieces that are hashed, in groups, and what the kernel needs of them on the device.

    Args:
        nbytes: size of each tensor in bytes.
        groups: the pieces that one call hashes together.
        device: of the tensors.
        chunk: words of 32 bits that a program reads, a power of two.

    Attributes:
        dispatcher: launches the kernels; `dispatcher.launches` counts them.

    Raises:
        TypeError: An argument has another type.
        ValueError: `chunk` is below 1.

    Example:
        >>> from dpfuse_kernels.bit_hash import BitHashTable, Piece
        >>> table = BitHashTable([40], [[Piece(0, 0, 40)]], torch.device("cpu"), chunk=4)
        >>> table.rows.tolist()
        [[0, 0, 16], [0, 16, 16], [0, 32, 8]]
    """

    def __init__(
        self, nbytes: Sequence[int], groups: Sequence[Sequence[Piece]], device: torch.device, *, chunk: int = CHUNK
    ) -> None:
        instance("nbytes", nbytes, Sequence, "a list of numbers of bytes")
        instance("groups", groups, Sequence, "a list of groups of Pieces")
        instance("device", device, torch.device, "a torch.device")
        whole("chunk", chunk, 1)
        self.nbytes = list(nbytes)
        self.groups = [list(group) for group in groups]
        self.device = device
        self.chunk = chunk
        self.dispatcher = Dispatcher(device)
        step = 4 * chunk
        rows: list[tuple[int, int, int]] = []
        self.ranges: list[range] = []  # the rows of each group
        for group in self.groups:
            before = len(rows)
            rows += [
                (tensor, first, min(step, start + length - first))
                for tensor, start, length in group
                for first in range(start, start + length, step)
            ]
            self.ranges.append(range(before, len(rows)))
        self._host_rows = rows
        self._inside = [list(dict.fromkeys(piece.tensor for piece in group)) for group in self.groups]
        self._addresses = [0] * len(self.nbytes)

    @cached_property
    def rows(self) -> Tensor:
        """Per program: tensor, first byte, bytes; [rows, 3] int64, on the device."""
        return torch.tensor(self._host_rows, dtype=torch.int64, device="cpu").view(-1, 3).to(self.device)

    @cached_property
    def ring(self) -> AddressRing:
        """The device copies of address lists."""
        return AddressRing(len(self.nbytes), self.device)

    @cached_property
    def state(self) -> Tensor:
        """What a launch adds up: a sum and a count, [2] int32, on the device."""
        with torch.inference_mode(False):  # what is made there cannot be written outside of it
            return torch.zeros(2, dtype=torch.int32, device=self.device)

    def addresses(self, group: int, tensors: Mapping[int, Tensor]) -> list[int]:
        """Return the addresses of all tensors, those of a group as they are now; 0 where there is none.

        The list is the same object for as long as no address changes, so comparing it costs nothing.
        """
        changed = {
            index: address
            for index in self._inside[group]
            if (address := tensors[index].data_ptr() if index in tensors else 0) != self._addresses[index]
        }
        if changed:
            self._addresses = [changed.get(index, address) for index, address in enumerate(self._addresses)]
        return self._addresses

    def _constants(self, pair: torch.dtype) -> dict[str, Any]:
        return {"PAIR": triton_dtype(pair), "CHUNK": self.chunk}


def bit_hash(table: BitHashTable, group: int, tensors: Mapping[int, Tensor], seed: int, pairs: Tensor) -> None:
    """Hash the bits of pieces of `tensors`, and write each bit b of the hash as a pair (b, 1 - b).

    For CUDA tensors this is one kernel launch on the current stream.

    Args:
        table: the pieces.
        group: which of them, by place.
        tensors: those of the group by place, dense; they are hashed in the order of their memory. What is missing is
            left out.
        seed: another one gives another hash of the same bits; below 2**31.
        pairs: [32, 2] of any floating-point dtype, contiguous, on the device: bit b becomes (b, 1 - b).

    Example:
        >>> import torch
        >>> from dpfuse_kernels import BitHashTable, Piece, bit_hash
        >>> table = BitHashTable([8], [[Piece(0, 0, 8)]], torch.device("cpu"))
        >>> one, other = torch.zeros(32, 2), torch.zeros(32, 2)
        >>> bit_hash(table, 0, {0: torch.tensor([1.0, 2.0])}, 1, one)
        >>> bit_hash(table, 0, {0: torch.tensor([1.0, 2.1])}, 1, other)
        >>> torch.equal(one, other)
        False

    Source: the mixing of a word is the end of MurmurHash3 (Appleby, in the public domain).
    """
    if not chooses_triton(table.device):
        bit_hash_reference(table, group, tensors, seed, pairs)
        return
    rows = table.ranges[group]
    copy = table.ring.device_copy(table.addresses(group, tensors))
    table.dispatcher.launch(
        (_bit_hash_kernel, pairs.dtype),
        len(rows),
        (copy.data_ptr(), table.rows.data_ptr(), rows.start, seed, table.state.data_ptr(), pairs.data_ptr()),
        {0: copy, 1: table.rows},
        partial(table._constants, pairs.dtype),
        WARPS,
    )


@torch.no_grad()
def bit_hash_reference(
    table: BitHashTable, group: int, tensors: Mapping[int, Tensor], seed: int, pairs: Tensor
) -> None:
    """Hash with torch's own operations, on any device. The result equals that of `bit_hash`.

    Arguments are those of `bit_hash`.
    """
    total = torch.zeros((), dtype=torch.int64, device=pairs.device)
    for index, start, nbytes in table.groups[group]:
        tensor = tensors.get(index)
        if tensor is None:
            continue
        memory = torch.as_strided(tensor, (tensor.numel(),), (1,))
        data = memory.view(torch.uint8)[start : start + nbytes]
        total += sum_of_words(data, index, seed, place=start // 4)
    write_bits(total & LOW, pairs)


def sum_of_words(data: Tensor, tensor: int = 0, seed: int = 0, *, place: int = 0) -> Tensor:
    """Return the hash of the bytes of one tensor, or of a piece of it. The host does not wait for a device.

    The hashes of pieces add up to that of the whole, modulo 2**32.

    Args:
        data: [bytes] uint8, contiguous. For each 4 of them, torch's operations take about 32 meanwhile.
        tensor: the place of the tensor in a list of tensors.
        seed: another one gives another hash; below 2**31.
        place: of the first word in the tensor. A word has 4 bytes.

    Returns:
        [] int64 of 0 to 2**32 - 1, on the device of `data`.

    Example:
        >>> import torch
        >>> from dpfuse_kernels.bit_hash import sum_of_words
        >>> data = torch.arange(8, dtype=torch.uint8)
        >>> pieces = sum_of_words(data[:4]) + sum_of_words(data[4:], place=1)
        >>> bool(pieces % 2**32 == sum_of_words(data))
        True
    """
    if len(data) % 4:
        data = torch.cat((data, data.new_zeros(4 - len(data) % 4)))
    elif data.storage_offset() % 4:  # where torch shows no words of 32 bits
        data = data.clone()
    word = data.view(torch.int32).long()
    word += torch.arange(place, place + len(word), device=word.device) * PLACE
    word += tensor * TENSOR + seed * SEED & LOW
    word &= LOW
    return _mixed(word).sum() & LOW


def _mixed(word: Tensor) -> Tensor:
    word = word ^ word >> 16
    word = word * FIRST & LOW
    word = word ^ word >> 13
    word = word * SECOND & LOW
    return word ^ word >> 16


def write_bits(number: Tensor, pairs: Tensor) -> None:
    """Write the bits of a number, [] int64 of 0 to 2**32 - 1, as pairs, [32, 2]: bit b becomes (b, 1 - b).

    Example:
        >>> pairs = torch.zeros(32, 2)
        >>> write_bits(torch.tensor(5), pairs)
        >>> pairs[:4].tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    """
    bits = (number >> torch.arange(BITS, device=number.device)) & 1
    pairs.copy_(torch.stack((bits, 1 - bits), dim=1))
