"""Fills tensors with NaN if numbers on the device say so. The host does not wait. Knows no bucket and no report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpfuse_kernels.address_ring import AddressRing
from dpfuse_kernels.arguments import instance, whole
from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.known_tensors import Seen
from dpfuse_kernels.launcher import Dispatcher, Repeatable, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["SpoilTable", "any_pair", "spoil", "spoil_reference"]

# Usually a program only reads the pairs. So there are few programs, each for many elements: no more programs than a
# large GPU runs at the same time.
CHUNK = 16384
WARPS = 8
PROGRAMS = 1024
PAIRS = 128  # that a program reads at a time


def _spoil_kernel(
    pair_address: tl.int64,  # [pairs, 2]
    address_ptr: tl.tensor,  # [tensors] int64
    chunk_ptr: tl.tensor,  # [chunks, 3] int64: tensor, first element, elements
    chunks: tl.int64,
    pairs: tl.int64,
    from_address: tl.int64,  # [copied]
    to_address: tl.int64,  # [copied], also of pinned memory of the host
    copied: tl.int64,
    PAIR: tl.constexpr,
    TENSOR: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Fill chunks p, p + programs, … with NaN in program p if a pair says so: `length` elements from `start` on.

    Whatever the pairs say, program 0 copies `copied` numbers of the dtype of the pairs from one address to another.

    Example: numels [3, 2], CHUNK 2 give chunks (0, 0, 2), (0, 2, 1), (1, 0, 2). With addresses [a, 0] and pairs
    [(0, 2), (1, 1)] all three elements of the first tensor become NaN, and nothing else changes.
    """
    found = 0
    first = 0
    if tl.program_id(0) == 0:
        while first < copied.to(tl.int32):
            lane = first + tl.arange(0, PAIRS)
            value = tl.load(from_address.to(tl.int64).to(tl.pointer_type(PAIR)) + lane, mask=lane < copied)
            tl.store(to_address.to(tl.int64).to(tl.pointer_type(PAIR)) + lane, value, mask=lane < copied)
            first += PAIRS
        first = 0
    while first < pairs.to(tl.int32):
        place = first + tl.arange(0, PAIRS)
        pair_ptr = pair_address.to(tl.int64).to(tl.pointer_type(PAIR)) + 2 * place
        one = tl.load(pair_ptr, mask=place < pairs, other=0.0)
        other = tl.load(pair_ptr + 1, mask=place < pairs, other=0.0)
        # A NaN is not zero either.
        found += tl.sum(((one.to(tl.float32) != 0) & (other.to(tl.float32) != 0)).to(tl.int32))
        first += PAIRS
    if found != 0:
        # Every address is computed in 64 bits: a tensor may exceed 2**31 elements.
        chunk = tl.program_id(0).to(tl.int64)
        while chunk < chunks:
            row_ptr = chunk_ptr + chunk * 3
            address = tl.load(address_ptr + tl.load(row_ptr))
            if address != 0:
                target = address + tl.load(row_ptr + 1) * (TENSOR.primitive_bitwidth // 8)
                lane = tl.arange(0, CHUNK)
                nan = tl.full([CHUNK], float("nan"), tl.float32).to(TENSOR)
                mask = lane < tl.load(row_ptr + 2).to(tl.int32)
                tl.store(target.to(tl.pointer_type(TENSOR)) + lane, nan, mask=mask)
            chunk += tl.num_programs(0)


class SpoilTable:
    """The sizes of the tensors of one dtype and device that are filled together.

    Args:
        numels: elements of each tensor.
        dtype: of the tensors: float32, float16, bfloat16 or float64.
        device: of the tensors.
        chunk: elements that a program fills at a time, a power of two.
        spans: of each tensor, the parts to be filled, as first element and number of elements; the rest of it is left
            alone. None fills the tensors as a whole. Tensors with spans are contiguous.

    Attributes:
        dispatcher: launches the kernels; `dispatcher.launches` counts them.
        triton: whether the kernel fills these tensors; None until that is chosen.

    Raises:
        TypeError: An argument has another type.
        ValueError: `chunk` is below 1.

    Example:
        >>> from dpfuse_kernels import SpoilTable
        >>> SpoilTable([5, 2], torch.float32, torch.device("cpu"), chunk=4).rows.tolist()
        [[0, 0, 4], [0, 4, 1], [1, 0, 2]]
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        chunk: int = CHUNK,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        instance("numels", numels, Sequence, "a list of numbers of elements")
        instance("dtype", dtype, torch.dtype, "a torch.dtype")
        instance("device", device, torch.device, "a torch.device")
        whole("chunk", chunk, 1)
        instance("spans", spans, (Sequence, NoneType), "None or a list of spans for each tensor")
        self.numels = list(numels)
        self.spans = spans
        self.dtype = dtype
        self.device = device
        self.chunk = chunk
        self.dispatcher = Dispatcher(device)
        self.triton: bool | None = None
        self._found: list[int] | None = None  # addresses of the last call's tensors, if all were as described
        self._seen = Seen()  # what these tensors were like
        self._repeated: tuple[tuple[Any, ...], Repeatable] | None = None  # what the last launch read, and it

    @cached_property
    def rows(self) -> Tensor:
        """Per chunk: tensor, first element, number of elements; [chunks, 3] int64, on the device."""
        spans = [[(0, numel)] for numel in self.numels] if self.spans is None else self.spans
        rows = [
            (index, start, min(self.chunk, first + numel - start))
            for index, parts in enumerate(spans)
            for first, numel in parts
            for start in range(first, first + numel, self.chunk)
        ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).to(self.device)

    @cached_property
    def ring(self) -> AddressRing:
        """The device copies of address lists."""
        return AddressRing(len(self.numels), self.device)

    def addresses(self, tensors: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
        """Return each tensor's address (0 for None), and a list of the tensors that the kernel cannot fill.

        The kernel cannot fill a tensor that differs from the table's description, is sparse, or has holes. Its address
        is 0, too. A check costs about 0.1 us per tensor if the addresses equal those of the last call, or the tensors
        are like those. No reference is kept, because gradients are freed between steps.
        """
        try:
            # A parameter's gradient keeps its size, dtype and device. An address that passed before passes again.
            found = _addresses_of(tensors)
            if found == self._found:
                return self._found, []  # not `found`: a later comparison of a list with itself costs little
            if self._seen.like(tensors):  # type: ignore[arg-type]  # False for None
                self._found = found
                return found, []
        except RuntimeError:  # a sparse tensor has no address
            pass
        if len(tensors) != len(self.numels):
            return [0] * len(self.numels), [tensor for tensor in tensors if tensor is not None]
        addresses: list[int] = []
        others: list[Tensor] = []
        for place, (tensor, numel) in enumerate(zip(tensors, self.numels, strict=True)):
            addresses.append(0)
            if tensor is not None and self._is_as_described(tensor, numel):
                addresses[-1] = tensor.data_ptr()
            elif tensor is not None:
                others += self._parts_of(place, tensor)
        self._found = None if others else addresses
        present = [tensor for tensor in tensors if tensor is not None]
        if not others and len(present) == len(tensors):
            self._seen.remember(present)
        return addresses, others

    def _parts_of(self, place: int, tensor: Tensor) -> list[Tensor]:
        """Return what is filled of a tensor: views of it where the table has spans."""
        if self.spans is None:
            return [tensor]
        return [tensor[first : first + numel] for first, numel in self.spans[place]]

    def _repeat(self, addresses: list[int], read: tuple[Any, ...]) -> bool:
        """Launch the last launch again if it was for the same addresses and read the same; return whether it was."""
        last = self._repeated
        if last is None or last[1].addresses is not addresses:
            return False
        return last[0] == read and self.dispatcher.repeat(last[1])

    def _constants(self, pair: torch.dtype) -> dict[str, Any]:
        """Return the compile-time arguments of the kernel, for pairs of this dtype."""
        types = {"PAIR": triton_dtype(pair), "TENSOR": triton_dtype(self.dtype)}
        return {**types, "PAIRS": PAIRS, "CHUNK": self.chunk}

    def _is_as_described(self, tensor: Tensor, numel: int) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.numel() == numel
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and _is_dense(tensor)
        )


def _addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]  # a TypeError for None
    except TypeError:
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def spoil(
    table: SpoilTable, tensors: Sequence[Tensor | None], pairs: Tensor, copy: tuple[Tensor, Tensor] | None = None
) -> None:
    """Fill `tensors` with NaN if both numbers of one of the `pairs`, on their device, differ from zero.

    For CUDA tensors this is one kernel launch on the current stream. The host does not wait.

    Args:
        table: the tensors' sizes.
        tensors: one per size; None is skipped. Torch fills a tensor that differs from the table's description, and then
            reads and writes it whatever the pairs say. If all addresses equal those of the last call, the tensors are
            not checked again.
        pairs: [2 * pairs] of any floating-point dtype, contiguous, on their device. The tensors are filled if both
            numbers of a pair differ from zero.
        copy: from and to: two tensors of as many numbers of the dtype of `pairs`, contiguous. The first is on their
            device, the second there or in pinned memory of the host. The same launch copies them, whatever the pairs
            say; the second must outlive the kernel.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import SpoilTable, spoil
        >>> gradient = torch.ones(2)
        >>> spoil(SpoilTable([2], torch.float32, torch.device("cpu")), [gradient], torch.tensor([0.0, 2.0, 1.0, 1.0]))
        >>> gradient
        tensor([nan, nan])
    """
    if table.triton is None:
        table.triton = chooses_triton(table.device)
    if not table.triton:
        spoil_reference(table, tensors, pairs, copy)
        return
    if "rows" not in table.__dict__ and table.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        spoil_reference(table, tensors, pairs, copy)
        return
    addresses, others = table.addresses(tensors)
    if others:
        _fill(others, pairs)
    if not any(addresses):
        _copy(copy)
        return
    copied = (0, 0, 0) if copy is None else (copy[0].data_ptr(), copy[1].data_ptr(), copy[0].numel())
    read = (pairs.data_ptr(), pairs.numel(), pairs.dtype, copied)
    if table._repeat(addresses, read):
        return
    try:
        uploaded = table.ring.device_copy(addresses)
    except ValueError:  # new addresses cannot be uploaded in a graph
        spoil_reference(table, tensors, pairs, copy)
        return
    rows = table.rows
    key, programs = (_spoil_kernel, pairs.dtype), min(len(rows), PROGRAMS)
    arguments = (pairs.data_ptr(), uploaded.data_ptr(), rows.data_ptr(), len(rows), pairs.numel() // 2, *copied)
    constants = partial(table._constants, pairs.dtype)
    table.dispatcher.launch(key, programs, arguments, {1: uploaded, 2: rows}, constants, WARPS)
    call = table.dispatcher.repeatable(key, programs, arguments, table.ring.latest)
    table._repeated = None if call is None else (read, call)


@torch.no_grad()
def spoil_reference(
    table: SpoilTable, tensors: Sequence[Tensor | None], pairs: Tensor, copy: tuple[Tensor, Tensor] | None = None
) -> None:
    """Fill with torch's own operations, for tensors of any layout. The result equals that of `spoil`.

    Arguments are those of `spoil`.
    """
    present = [(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None]
    _fill([part for place, tensor in present for part in table._parts_of(place, tensor)], pairs)
    _copy(copy)


def _copy(copy: tuple[Tensor, Tensor] | None) -> None:
    if copy is not None:
        copy[1].copy_(copy[0], non_blocking=True)


@torch.no_grad()
def _fill(tensors: Sequence[Tensor], pairs: Tensor) -> None:
    alarm = any_pair(pairs)
    for tensor in tensors:
        memory = tensor if tensor.layout is torch.strided else tensor._values()
        memory.masked_fill_(alarm, math.nan)


def any_pair(pairs: Tensor) -> Tensor:
    """Return whether both numbers of some pair differ from zero: bool, [], on their device.

    Example:
        >>> any_pair(torch.tensor([0.0, 2.0, 1.0, 1.0])), any_pair(torch.tensor([0.0, 2.0]))
        (tensor(True), tensor(False))
    """
    return pairs.view(-1, 2).ne(0).all(1).any()
