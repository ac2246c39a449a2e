"""A 32-bit number for the bits of a tensor, or of anything that holds tensors. Knows no step and no file."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpfuse.engine.inner_tensors import dense_parts, has_memory, memory_of

__all__ = ["NOTHING", "Hash", "hash_of", "hash_of_all", "inner_tensors", "read", "text_of"]

Hash = int | Tensor  # a tensor, [] int64, where the device has not been waited for
NOTHING = -1  # where there is no tensor
CHUNK = 1 << 22  # words of a tensor on a GPU that are hashed at once, since each takes 24 bytes meanwhile
ODD, STEP = 0x9E3779B1, 0x85EBCA77  # of the factors by which words are multiplied


def hash_of(tensor: Tensor | None, start: Hash = 0) -> Hash:
    """Return a number that depends on each bit of the values, on their order, and on nothing else.

    On a CPU it is the CRC-32, which reads about 3 GB/s on one core. Elsewhere it is a sum of words times odd factors,
    which is not waited for. So numbers from different kinds of devices cannot be compared.

    Args:
        tensor: of any shape, dtype and layout. None gives `NOTHING`, and so does one whose elements are not here.
        start: the number of what came before it.

    Example:
        >>> import torch
        >>> from dpfuse.trace.tensor_hash import hash_of
        >>> hash_of(torch.tensor([1.0, 2.0])) == hash_of(torch.tensor([[1.0], [2.0]]))
        True
        >>> hash_of(torch.tensor([0.0])) == hash_of(torch.tensor([-0.0]))
        False
    """
    if tensor is None:
        return NOTHING
    inner = inner_tensors(tensor)
    if inner is not None:
        for each in inner:
            start = hash_of(each, start)
        return start if inner else NOTHING
    with torch.no_grad():
        values = memory_of(tensor).detach() if has_memory(tensor) else tensor.detach()
        parts = dense_parts(values)
        if parts is not None:
            for part in parts:
                start = hash_of(part, start)
            return start
        if values.device.type == "meta":
            return zlib.crc32(repr(tuple(values.shape)).encode(), int(start))
        flat = values.resolve_conj().resolve_neg().contiguous().view(-1)
        if not flat.numel():
            return start
        flat = flat.view(torch.uint8)
        if flat.device.type == "cpu":
            return zlib.crc32(flat.numpy().data, int(start))
        return _hash_on_device(flat, start)


def inner_tensors(tensor: Tensor) -> Sequence[Tensor] | None:
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


def _hash_on_device(flat: Tensor, start: Hash) -> Tensor:
    """Return the sum of words times odd factors, cut to 32 bits; a change of one word always changes it.

    Args:
        flat: [bytes] uint8.
        start: as for `hash_of`.
    """
    whole = len(flat) // 4 * 4
    words = flat[:whole].view(torch.int32)
    total = torch.as_tensor(start, dtype=torch.int64, device=flat.device) * ODD
    for begin in range(0, len(words), CHUNK):
        part = words[begin : begin + CHUNK].long()
        total = total + (part * _factors(begin, len(part), flat.device)).sum()
    last = flat[whole:].long()
    total = total + (last * _factors(len(words), len(last), flat.device)).sum()
    return (total ^ (total >> 32)) & 0xFFFFFFFF


def _factors(begin: int, count: int, device: torch.device) -> Tensor:
    places = torch.arange(begin, begin + count, device=device)
    mixed = (places * STEP) ^ (places >> 7)
    return (mixed * ODD ^ (mixed >> 15)) | 1


def hash_of_all(value: object) -> Hash:
    """Return a number for all tensors in containers of containers, for numbers and texts, and for their places.

    Args:
        value: a tensor, a number, a text, None, or a mapping, sequence or dataclass of such. Of other objects only the
            type counts.
    """
    parts = list(_parts(value))
    found = [hash_of(part) if isinstance(part, Tensor) else zlib.crc32(part) for part in parts]
    if any(isinstance(part, Tensor) for part in found):
        device = next(part.device for part in found if isinstance(part, Tensor))
        together = torch.stack([torch.as_tensor(part, device=device) for part in found])
        return _hash_on_device(together.view(torch.uint8), 0)
    return zlib.crc32(b"".join(int(part).to_bytes(4, "big") for part in found))


def _parts(value: object) -> Iterable[Tensor | bytes]:
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)  # a nested tensor may have none
        yield f"{shape} {value.dtype}".encode()
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key).encode()
            yield from _parts(one)
    elif isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        yield repr(value).encode()
    elif isinstance(value, Sequence):
        yield str(len(value)).encode()
        for one in value:
            yield from _parts(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    else:
        yield type(value).__qualname__.encode()


def read(hashes: Sequence[Hash]) -> list[int]:
    """Return the numbers; waits for the device once where it has to."""
    waiting = [number for number in hashes if isinstance(number, Tensor)]
    if not waiting:
        return [int(number) for number in hashes]
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in waiting:
        by_device.setdefault(number.device, []).append(number)
    known = {id(one): value for group in by_device.values() for one, value in zip(group, _read(group), strict=True)}
    return [known[id(number)] if isinstance(number, Tensor) else number for number in hashes]


def _read(numbers: list[Tensor]) -> list[int]:
    found: list[int] = torch.stack(numbers).tolist()
    return found


def text_of(hashes: Sequence[int]) -> str:
    """Return eight characters for each number; a minus sign eight times where there is no tensor."""
    return "".join("-" * 8 if number == NOTHING else f"{number:08x}" for number in hashes)
