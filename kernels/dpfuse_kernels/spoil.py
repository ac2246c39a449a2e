"""Fills tensors with NaN if a flag on the device is set. The host does not wait. Knows no bucket and no report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.address_ring import AddressRing
from dpfuse_kernels.launcher import current_device, dispatch, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["SpoilTable", "spoil", "spoil_reference"]

# Usually a program only reads the flag. So there are few programs, each for many elements: no more programs than a
# large GPU runs at the same time.
CHUNK = 16384
WARPS = 8
PROGRAMS = 1024


def _spoil_kernel(
    flag_ptr: tl.tensor,  # [1] uint8
    address_ptr: tl.tensor,  # [tensors] int64
    chunk_ptr: tl.tensor,  # [chunks, 3] int64: tensor, first element, elements
    chunks: tl.int64,
    TENSOR: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Fill chunks p, p + programs, … with NaN in program p if the flag is set: `length` elements from `start` on.

    Example: numels [3, 2], CHUNK 2 give chunks (0, 0, 2), (0, 2, 1), (1, 0, 2). With addresses [a, 0] and flag 1 all
    three elements of the first tensor become NaN, and nothing else changes.
    """
    if tl.load(flag_ptr) != 0:
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

    Attributes:
        launches: number of kernels launched.

    Example:
        >>> from dpfuse_kernels import SpoilTable
        >>> SpoilTable([5, 2], torch.float32, torch.device("cpu"), chunk=4).rows.tolist()
        [[0, 0, 4], [0, 4, 1], [1, 0, 2]]
    """

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device, *, chunk: int = CHUNK) -> None:
        self.numels = list(numels)
        self.dtype = dtype
        self.device = device
        self.chunk = chunk
        self.launches = 0
        self._found: list[int] | None = None  # addresses of the last call's tensors, if all were as described

    @cached_property
    def rows(self) -> Tensor:
        """Per chunk: tensor, first element, number of elements; [chunks, 3] int64, on the device."""
        rows = [
            (index, start, min(self.chunk, numel - start))
            for index, numel in enumerate(self.numels)
            for start in range(0, numel, self.chunk)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(self.device)

    @cached_property
    def ring(self) -> AddressRing:
        """The device copies of address lists."""
        return AddressRing(len(self.numels), self.device)

    def addresses(self, tensors: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
        """Return each tensor's address (0 for None), and a list of the tensors that the kernel cannot fill.

        The kernel cannot fill a tensor that differs from the table's description, is sparse, or has holes. Its address
        is 0, too. A check costs about 0.1 us per tensor if the addresses equal those of the last call. No reference is
        kept, because gradients are freed between steps.
        """
        try:
            # A parameter's gradient keeps its size, dtype and device. An address that passed before passes again.
            found = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            if found == self._found:
                return found, []
        except RuntimeError:  # a sparse tensor has no address
            pass
        if len(tensors) != len(self.numels):
            return [0] * len(self.numels), [tensor for tensor in tensors if tensor is not None]
        addresses, others = [], []
        for tensor, numel in zip(tensors, self.numels, strict=True):
            addresses.append(0)
            if tensor is not None and self._is_as_described(tensor, numel):
                addresses[-1] = tensor.data_ptr()
            elif tensor is not None:
                others.append(tensor)
        self._found = None if others else addresses
        return addresses, others

    def _is_as_described(self, tensor: Tensor, numel: int) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.numel() == numel
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and _is_dense(tensor)
        )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


@torch.no_grad()
def spoil(table: SpoilTable, tensors: Sequence[Tensor | None], alarm: Tensor) -> None:
    """Fill `tensors` with NaN if `alarm` is set, with one kernel launch on the current stream. The host does not wait.

    Args:
        table: the tensors' sizes.
        tensors: one per size; None is skipped. Torch fills a tensor that differs from the table's description, and then
            reads and writes it whether `alarm` is set or not. If all addresses equal those of the last call, the
            tensors are not checked again.
        alarm: bool, [], on their device.

    Example:
        >>> import torch
        >>> from dpfuse_kernels.spoil import SpoilTable, spoil_reference
        >>> gradient = torch.ones(3)
        >>> table = SpoilTable([3], torch.float32, torch.device("cpu"))
        >>> spoil_reference(table, [gradient], torch.tensor(True))
        >>> gradient
        tensor([nan, nan, nan])
    """
    capturing = table.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing and "rows" not in table.__dict__:
        spoil_reference(table, tensors, alarm)
        return
    addresses, others = table.addresses(tensors)
    spoil_reference(table, others, alarm)
    if not any(addresses):
        return
    try:
        copy = table.ring.device_copy(addresses)
    except ValueError:  # new addresses cannot be uploaded in a graph
        spoil_reference(table, tensors, alarm)
        return
    chunks = len(table.rows)
    arguments = (alarm.view(torch.uint8), copy, table.rows, chunks)
    constants = {"TENSOR": triton_dtype(table.dtype), "CHUNK": table.chunk}
    with current_device(table.device):
        dispatch(_spoil_kernel, table.device, min(chunks, PROGRAMS), arguments, constants, WARPS)
    table.launches += 1


@torch.no_grad()
def spoil_reference(table: SpoilTable, tensors: Sequence[Tensor | None], alarm: Tensor) -> None:
    """Fill with torch's own operations, for tensors of any layout. The result equals that of `spoil`.

    Args:
        table: the tensors' sizes; not used.
        tensors: as for `spoil`.
        alarm: bool, [].

    Example:
        >>> from dpfuse_kernels.spoil import SpoilTable
        >>> gradient = torch.ones(2)
        >>> spoil_reference(SpoilTable([2], torch.float32, torch.device("cpu")), [gradient], torch.tensor(False))
        >>> gradient
        tensor([1., 1.])
    """
    for tensor in tensors:
        if tensor is not None:
            memory = tensor if tensor.layout is torch.strided else tensor._values()
            memory.masked_fill_(alarm, math.nan)
