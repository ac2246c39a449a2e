"""The hash of a tensor: a number of 32 bits that depends on each bit of its values. Knows no model, step or file.

On a CPU it is the CRC-32 of zlib, or of a large tensor what torch computes two to four times as fast. On any other
device it is the algorithm of the kernel `bit_hash`. So numbers from different kinds of devices cannot be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import string_at
from functools import cache
from zlib import crc32

import torch
from torch import Tensor, nn

from dpfuse.engine.inner_tensors import dense_parts, has_memory, memory_of
from dpfuse_kernels.bit_hash import sum_of_words

__all__ = ["NOTHING", "Hash", "hash_of", "hash_of_all", "hash_of_small", "joined", "parts_of_class", "read", "text_of"]

Hash = int | Tensor  # a tensor, [] int64, where the device has not been waited for
NOTHING = -1  # where there is no tensor
CHUNK = 1 << 24  # bytes of a tensor that are hashed at once; on a GPU torch takes 128 MB for that
LARGE = 1 << 18  # bytes of a tensor on a CPU that torch hashes faster than zlib
ROW = 512  # words of 64 bits
ODD, LOW = 0x85EBCA77, 0xFFFFFFFF


def hash_of(tensor: Tensor | None, start: Hash = 0, *, seed: int = 0) -> Hash:
    """Return a number that depends on each bit of the values, on their order, and on nothing else.

    Other tensors have the same number with a probability of 1 in 2**32. Where one bit differs, up to 256 KB on a CPU,
    the number always does. The host does not wait for a device.

    Args:
        tensor: of any shape, dtype and layout. None gives `NOTHING`, and so does one whose elements are not here.
        start: the number of what came before it.
        seed: another one gives another number of the same bits, so that two tensors with one number by chance differ
            in the next. On a CPU, an odd one reads up to 256 KB backwards.

    Returns:
        0 to 2**32 - 1, or `NOTHING`: on a CPU an int, elsewhere a tensor, [] int64, which `read` reads.

    Example:
        >>> import torch
        >>> from dpfuse.engine.tensor_hash import hash_of
        >>> hash_of(torch.tensor([1.0, 2.0])) == hash_of(torch.tensor([[1.0], [2.0]]))
        True
        >>> hash_of(torch.tensor([0.0])) == hash_of(torch.tensor([-0.0]))
        False
    """
    if tensor is None:
        return NOTHING
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_nested:
        parts = parts_of_class(tensor)
        if parts is None:
            tensor = memory_of(tensor).detach() if has_memory(tensor) else tensor.detach()
            parts = dense_parts(tensor)
        elif not parts:
            return NOTHING
        if parts is not None:
            for part in parts:
                start = hash_of(part, start, seed=seed)
            return start
    if tensor.is_meta:
        return joined([start, crc32(repr(tuple(tensor.shape)).encode())])
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    if not len(flat):
        return start
    if flat.is_cpu:
        return _hash_on_host(flat, start, seed)
    return _hash_on_device(flat, start, seed)


def hash_of_small(tensors: Iterable[Tensor], seed: int = 0) -> int:
    """Return the number that `hash_of` gives when it goes from each of these tensors to the next, in less time.

    A tensor of some bytes takes 0.8 us instead of about 10.

    Args:
        tensors: on a CPU, dense, of at most some KB each, which are copied.
        seed: as for `hash_of`.

    Returns:
        0 to 2**32 - 1.

    Example:
        >>> import torch
        >>> from dpfuse.engine.tensor_hash import hash_of, hash_of_small
        >>> one, other = torch.ones(2), torch.zeros(1)
        >>> hash_of_small([one, other]) == hash_of(other, hash_of(one))
        True
    """
    found = 0
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.is_complex():
            tensor = tensor.resolve_conj().contiguous()
        memory = string_at(tensor.data_ptr(), tensor.nbytes)
        found = crc32(memory[::-1] if seed % 2 else memory, found)
    return found


def parts_of_class(tensor: Tensor) -> Sequence[Tensor] | None:
    """Return the tensors in which one of a class of its own keeps its elements; None for a usual tensor.

    There are none where the elements are not in this process, as in the gradients of a sharded optimizer. Of a
    `DTensor` it is the part of this rank.

    Source: the protocol of torch's subclasses, `__tensor_flatten__`.
    """
    if type(tensor) in (Tensor, nn.Parameter) or tensor.is_nested:
        return None
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, Tensor)]  # a mesh may be among them
    has_elements = tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta
    return () if has_elements and not tensor.data_ptr() else None


def _hash_on_host(flat: Tensor, start: Hash, seed: int) -> Hash:
    """Return the number of bytes, [bytes] uint8."""
    if len(flat) < LARGE:
        memory = string_at(flat.data_ptr(), len(flat))
        memory = memory[::-1] if seed % 2 else memory
        return joined([start, crc32(memory)]) if isinstance(start, Tensor) else crc32(memory, start)
    return joined([start, *(_hash_of_large(part, seed) for part in flat.split(CHUNK))])


def _hash_of_large(flat: Tensor, seed: int) -> int:
    """Return a number of bytes, [bytes] uint8, at about the speed of `sum`.

    Each word of 64 bits belongs to a row and to a column of a table. The sums of rows and columns are hashed, so the
    place of each bit counts. Each half of a sum is multiplied by an odd number of 64 bits, so that a flipped bit always
    changes the sum of all, and two flipped bits do not cancel out.
    """
    rows = len(flat) // (8 * ROW)
    end = rows * 8 * ROW
    block = flat[:end].clone() if flat.data_ptr() % 8 or flat.storage_offset() % 8 else flat[:end]
    block = block.view(torch.int64).view(rows, ROW)
    sums = torch.cat((block.sum(1), block.sum(0))).view(torch.int32)
    first = seed * 977 % ROW
    found = int(torch.dot(sums.long(), _odd_numbers()[first : first + len(sums)])) & ((1 << 64) - 1)
    tail = flat[end:]
    return int(joined([found, found >> 32, crc32(string_at(tail.data_ptr(), len(tail)))]))


@cache
def _odd_numbers() -> Tensor:
    """Return odd numbers of 64 bits without a pattern, int64, the same in each process.

    Source: the generator SplitMix64.
    """
    count = 2 * (CHUNK // (8 * ROW) + ROW) + ROW
    mixed = torch.arange(1, count + 1, device="cpu") * (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = mixed ^ (mixed >> shift & ((1 << (64 - shift)) - 1))
        mixed = mixed * (factor - (1 << 64) if factor >= 1 << 63 else factor)
    return mixed | 1


def _hash_on_device(flat: Tensor, start: Hash, seed: int = 0) -> Hash:
    """Return what `bit_hash` computes of bytes, [bytes] uint8, on any device."""
    total = sum(
        sum_of_words(flat[begin : begin + CHUNK], seed=seed, place=begin // 4) for begin in range(0, len(flat), CHUNK)
    )
    return joined([start.to(flat.device, non_blocking=True) if isinstance(start, Tensor) else start, total])


def joined(hashes: Iterable[Hash]) -> Hash:
    """Return one number for several in this order; if one of them changes, it always changes. Waits for no device.

    Args:
        hashes: ints, and tensors of one device, as `hash_of` returns them.

    Example:
        >>> from dpfuse.engine.tensor_hash import joined
        >>> joined([5]), joined([1, 2]) == joined([2, 1])
        (5, False)
    """
    total: Hash = 0
    for each in hashes:
        total = (total * ODD + each) & LOW
    return total


def hash_of_all(value: object) -> Hash:
    """Return a number for all tensors in containers of containers, for numbers and texts, and for their places.

    Args:
        value: a tensor, a number, a text, None, or a mapping, sequence or dataclass of such. Of other objects only the
            type counts.
    """
    return joined(hash_of(part) if isinstance(part, Tensor) else crc32(part) for part in _leaves_of(value))


def _leaves_of(value: object) -> Iterator[Tensor | bytes]:
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)  # a nested tensor may have none
        yield f"{shape} {value.dtype}".encode()
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key).encode()
            yield from _leaves_of(one)
    elif isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        yield repr(value).encode()
    elif isinstance(value, Sequence):
        yield str(len(value)).encode()
        for one in value:
            yield from _leaves_of(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves_of(getattr(value, field.name))
    else:
        yield type(value).__qualname__.encode()


def read(hashes: Sequence[Hash]) -> list[int]:
    """Return the numbers; waits for each device once where it has to."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in hashes:
        if isinstance(number, Tensor):
            by_device.setdefault(number.device, []).append(number)
    found = {device: iter(torch.stack(group).tolist()) for device, group in by_device.items()}
    return [next(found[number.device]) if isinstance(number, Tensor) else int(number) for number in hashes]


def text_of(hashes: Sequence[int]) -> str:
    """Return eight characters for each number; a minus sign eight times where there is no tensor."""
    return "".join("-" * 8 if number == NOTHING else f"{number:08x}" for number in hashes)
