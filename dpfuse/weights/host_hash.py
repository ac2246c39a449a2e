"""Hashes the bits of tensors on a CPU: large ones at about the speed of `sum`, small ones in a call of C for each.

Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

__all__ = ["folded", "hash_of_memory", "joined_hash_of"]

ROW = 512  # integers of 64 bits
DIRECT = 16 << 10  # integers of 32 bits that are multiplied one by one: for so few, sums of rows would cost more
ENTRIES = 1 << 15  # of the table: more than a piece needs
ODD = 0x9E3779B97F4A7C15
LOW, ALL = (1 << 32) - 1, (1 << 64) - 1


@cache
def _table() -> Tensor:
    """Odd numbers of 64 bits without a pattern, [ENTRIES] int64, the same in each process: SplitMix64."""
    mixed = torch.arange(1, ENTRIES + 1, device="cpu") * (ODD - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = mixed ^ (mixed >> shift & ((1 << (64 - shift)) - 1))
        mixed = mixed * (factor - (1 << 64) if factor >= 1 << 63 else factor)
    return mixed | 1


def hash_of_memory(memory: Tensor, seed: int) -> int:
    """Return the hash of all bits of a tensor, below 2**64.

    Each number of 64 bits belongs to a row and to a column of a table. The sums of rows and columns are hashed, so the
    place of each bit counts. Each half of a sum is multiplied by an odd number of 64 bits, so that a flipped bit always
    changes the hash, and two flipped bits do not cancel out.

    Args:
        memory: [elements] of any dtype, contiguous.
        seed: another one gives another hash of the same bits; from 0 on.

    Example:
        >>> hash_of_memory(torch.tensor([1.0, 2.0]), 0) != hash_of_memory(torch.tensor([2.0, 1.0]), 0)
        True
    """
    words = _words(memory)
    count = words.numel()
    if count > DIRECT:
        rows = count // (2 * ROW)
        end = rows * 2 * ROW
        inside = words[:end] if words.storage_offset() % 2 == 0 else words[:end].clone()
        block = inside.view(torch.int64).view(rows, ROW)
        words = torch.cat((torch.cat((block.sum(1), block.sum(0))).view(torch.int32), words[end:]))
        count = words.numel()
    start = seed * 977 % (ENTRIES - count)
    return int(torch.dot(words.long(), _table()[start : start + count])) & ALL


def joined_hash_of(tensors: Sequence[Tensor], seed: int) -> int:
    """Return the hash of small tensors as if they were one, below 2**32; their shapes and dtypes do not count.

    It is a CRC-32. For so few bytes torch's operations take longer than to read them: four times as long where other
    work has filled the caches. Of bytes that differ in few bits it is never the same.

    Args:
        tensors: dense, of at most some KB each.
        seed: an odd one reads each tensor backwards. So what has the same hash by chance in one pass has another one in
            the next.

    Example:
        >>> joined_hash_of([torch.ones(2), torch.zeros(1)], 0) == joined_hash_of([torch.tensor([1.0, 1.0, 0.0])], 0)
        True
    """
    found = 0
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_complex():
            tensor = tensor.resolve_conj().contiguous()
        memory = string_at(tensor.data_ptr(), tensor.nbytes)
        found = crc32(memory[::-1] if seed % 2 else memory, found)
    return found


def folded(hashes: Sequence[int]) -> int:
    """Return 32 bits in which all bits of some hashes, and their order, take part.

    Example:
        >>> folded([1, 2]) != folded([2, 1]), folded([1]) < 2**32
        (True, True)
    """
    total = 0
    for each in hashes:
        total = (total * ODD + each) & ALL
    total = (total ^ total >> 32) * ODD & ALL
    return total >> 32


def _words(memory: Tensor) -> Tensor:
    """Return the bits as integers of 32 bits, the last one filled with zeros."""
    if memory.is_complex():
        memory = torch.view_as_real(memory.resolve_conj()).view(-1)
    width = memory.element_size()
    if width < 4:
        rest = memory.numel() % (4 // width)
        memory = memory.view(torch.uint8 if width == 1 else torch.int16)
        if rest:
            memory = torch.cat((memory, memory.new_zeros(4 // width - rest)))
        elif memory.storage_offset() % (4 // width):
            memory = memory.clone()
    return memory.view(torch.int32)
