"""Hashes the tensors of a model, a slice after each step, or each by itself. Knows no rank and no report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import memmove
from itertools import repeat

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import dense_stride
from dpfuse.engine.tensor_hash import hash_of, hash_of_small, joined
from dpfuse.engine.torch_private import no_graph
from dpfuse.weights.schedule import slices_of
from dpfuse_kernels import BitHashTable, Piece, bit_hash
from dpfuse_kernels.bit_hash import BITS, write_bits

__all__ = ["Hashing", "Hold"]

Hold = Callable[[Tensor], Callable[[], "Tensor | None"]]
SMALL = 16 << 10  # bytes of a tensor that is hashed together with others


class Hashing:
    """The tensors of a model, and the order in which they are hashed.

    A tensor that moved to another device, or has another shape or dtype by now, is left out. Of a small one on a CPU
    only the size in bytes is looked at.

    Args:
        tensors: by name; strided, on `device`.
        strides: by name, those in whose order a larger tensor is hashed, whichever it has by then: the same on all
            ranks. They are dense; where a name is missing, or the shape is another one, they are those of the tensor.
            On a CPU, small tensors are hashed in the order of their indices.
        device: of the tensors.
        hold: returns what returns a tensor, or None after it was freed; None holds the tensors.

    Attributes:
        names: of the tensors.
        slices: the number of slices of a pass.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
        hold: Hold | None = None,
    ) -> None:
        self.names = list(tensors)
        self._tensors = [repeat(tensor).__next__ if hold is None else hold(tensor) for tensor in tensors.values()]
        self._device = device
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors.values()]
        own = ((tensor, strides.get(name)) for name, tensor in tensors.items())
        self._strides = [
            dense_stride(tensor) if agreed is None or not _are_dense(agreed, tensor.shape) else agreed
            for tensor, agreed in own
        ]
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
        self._pieces = slices_of(self._sizes)
        self.slices = len(self._pieces)
        self._table: BitHashTable | None = None
        self._whole: BitHashTable | None = None
        # On a CPU: of each slice, small tensors, and pieces of the others.
        self._small: list[list[int]] = []
        self._large: list[list[Piece]] = []
        if device.type == "cpu":
            for pieces in self._pieces:
                self._small.append([piece.tensor for piece in pieces if self._sizes[piece.tensor] <= SMALL])
                self._large.append([piece for piece in pieces if self._sizes[piece.tensor] > SMALL])
        else:
            self._table = BitHashTable(self._sizes, self._pieces, device)
            everything = self._found(self._places)
            for number in range(self.slices):  # so that all addresses are uploaded at once
                self._table.addresses(number, everything)

    def describe(self) -> str:
        """Return what must be equal on all ranks for their hashes to be comparable, one line per tensor."""
        lines = zip(self.names, self._kinds, self._strides, strict=True)
        return "\n".join(f"{name} {tuple(shape)} {dtype} {stride}" for name, (shape, dtype), stride in lines)

    def is_empty(self, number: int) -> bool:
        """Whether nothing is hashed in this slice."""
        return not self._pieces[number]

    def empty_behind(self, number: int) -> int:
        """Return how many slices of the same pass are empty after this one, up to the next that is not."""
        behind = range(number + 1, self.slices)
        return next((count for count, place in enumerate(behind) if self._pieces[place]), len(behind))

    def slices_with(self, tensor: int) -> Iterable[int]:
        """Return the slices that hash a part of the tensor at this place."""
        return (number for number, pieces in enumerate(self._pieces) if any(one.tensor == tensor for one in pieces))

    def numel(self, tensor: int) -> int:
        """Return the elements of the tensor at this place."""
        return self._kinds[tensor][0].numel()

    def memory_of(self, tensor: int) -> Tensor | None:
        """Return the elements of the tensor at this place as they lie in memory, [elements]; None if it is left out."""
        return None if (found := self._dense(tensor)) is None else found.as_strided((found.numel(),), (1,))

    def write(self, number: int, seed: int, pairs: Tensor, but: Collection[int] = ()) -> None:
        """Hash a slice, and write each bit b of the hash as a pair (b, 1 - b).

        Args:
            number: which slice.
            seed: another one gives another hash; from 0 on.
            pairs: [32, 2], on the device. On a GPU the host does not wait.
            but: places of tensors to leave out.
        """
        if self._table is not None:
            inside = {piece.tensor for piece in self._pieces[number]}.difference(but)
            with no_graph():
                bit_hash(self._table, number, self._found(inside), seed, pairs)
            return
        tensors, sizes = self._tensors, self._sizes
        # Shapes do not count here. To compare them takes as long as to hash.
        found = [
            one
            for place in self._small[number]
            if (one := tensors[place]()) is not None and one.nbytes == sizes[place] and one.is_cpu and place not in but
        ]
        hashes = [hash_of_small(found, seed)]
        if self._large[number]:
            with no_graph():
                hashes += self._hashes_of(self._large[number], seed, but)
        write_number(int(joined(hashes)), pairs)

    def _hashes_of(self, pieces: Iterable[Piece], seed: int, but: Collection[int]) -> Iterator[int]:
        for place, start, nbytes in pieces:
            memory = None if place in but else self.memory_of(place)
            if memory is not None:
                width = memory.element_size()
                yield int(hash_of(memory[start // width : (start + nbytes) // width], seed=seed))

    @torch.no_grad()
    def each(self) -> Tensor:
        """Return the hash of each tensor, [tensors] int64, on the device; 0 for one that is left out."""
        if self._device.type == "cpu":
            memories = map(self.memory_of, self._places)
            found = [0 if memory is None else int(hash_of(memory)) for memory in memories]
            return torch.tensor(found, dtype=torch.int64, device="cpu")
        if self._whole is None:
            whole = [[Piece(place, 0, size)] for place, size in enumerate(self._sizes)]
            self._whole = BitHashTable(self._sizes, whole, self._device)
        pairs = torch.zeros((len(self._tensors), BITS, 2), device=self._device)
        everything = self._found(self._places)
        for place in self._places:  # so that all addresses are uploaded at once
            self._whole.addresses(place, everything)
        for place in everything:
            if self._sizes[place]:
                bit_hash(self._whole, place, everything, 0, pairs[place])
        return (pairs[:, :, 0].long() << torch.arange(BITS, device=self._device)).sum(1)

    @property
    def _places(self) -> range:
        return range(len(self._tensors))

    def _found(self, places: Iterable[int]) -> dict[int, Tensor]:
        return {place: found for place in places if (found := self._dense(place)) is not None}

    def _as_planned(self, place: int) -> Tensor | None:
        """Return a tensor; None if it is no longer what it was."""
        tensor = self._tensors[place]()
        if tensor is None:
            return None
        shape, dtype = self._kinds[place]
        same = tensor.shape == shape and tensor.dtype == dtype and tensor.device == self._device
        return tensor if same else None

    def _dense(self, place: int) -> Tensor | None:
        """Return a tensor, or a copy of it, whose memory is as planned; None if it is left out."""
        tensor = self._as_planned(place)
        if tensor is None or tensor.stride() == self._strides[place]:
            return tensor
        shape, dtype = self._kinds[place]
        return torch.empty_strided(shape, self._strides[place], dtype=dtype, device=self._device).copy_(tensor)


def _are_dense(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the elements of a tensor of this shape lie side by side in memory with these strides."""
    if len(strides) != len(shape):
        return False
    length = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if step != length:
                return False
            length *= size
    return True


_bytes_as_pairs: dict[torch.dtype, list[bytes]] = {}  # of each byte, its bits as pairs, as they lie in memory


def write_number(number: int, pairs: Tensor) -> None:
    """Write the bits of a number below 2**32 as pairs, [32, 2] on a CPU, contiguous. Torch counts no write.

    Example:
        >>> pairs = torch.zeros(32, 2)
        >>> write_number(5, pairs)
        >>> pairs[:3].tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    table = _bytes_as_pairs.get(pairs.dtype)
    if table is None:
        table = _bytes_as_pairs[pairs.dtype] = []
        for byte in range(256):
            whole = torch.zeros((BITS, 2), dtype=pairs.dtype, device="cpu")
            write_bits(torch.tensor(byte, device="cpu"), whole)
            table.append(bytes(whole[:8].view(torch.uint8).flatten().tolist()))
    memory = b"".join([table[byte] for byte in number.to_bytes(4, "little")])
    memmove(pairs.data_ptr(), memory, len(memory))
