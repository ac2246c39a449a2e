"""The layout of one flat buffer, with what runs over it. Knows no bucket and no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dpfuse_kernels.entries import Entries
from dpfuse_kernels.host_plan import HostPlan
from dpfuse_kernels.known_tensors import Seen
from dpfuse_kernels.launcher import Launcher
from dpfuse_kernels.layout import Layout, Slot

__all__ = ["PointerTable"]


class PointerTable(Layout):
    """The places of all tensors in one flat buffer, built once per plan and used at every pack and unpack.

    Args:
        flat: the buffer, 1-D and contiguous; its dtype is the wire dtype. The table keeps it alive and relies on its
            address: never resize it.
        slots: one per tensor, in the order in which `flatten` and `unflatten` get the tensors. They may lie
            anywhere in `flat` but must not overlap.
        dtype: dtype of the tensors that are packed and unpacked.

    Attributes:
        views: per slot, a view of `flat` with the slot's shape and strides.
        address: of `flat`, in bytes.
        triton: whether kernels run over this table; None until `uses_triton` has chosen.
        seen: the last tensors that a kernel got.
        all_own: the entries of a call in which each tensor is its slot.

    Raises:
        TypeError: An argument has another type.
        ValueError: A slot leaves the buffer, overlaps another slot or is not dense; `flat` is not 1-D and contiguous;
            or a dtype is not float32, float16, bfloat16 or float64.

    Example:
        >>> flat = torch.zeros(8)
        >>> slots = [Slot("a", 0, (3,), (1,)), Slot("b", 4, (2, 2), (2, 1))]
        >>> table = PointerTable(flat, slots, torch.float32)
        >>> table.views[1].shape
        torch.Size([2, 2])
    """

    def __init__(self, flat: Tensor, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        super().__init__(flat, slots, dtype)
        self.triton: bool | None = None
        self.seen = Seen()
        self.all_own = Entries(self.addresses, own=None)

    def first(self, count: int) -> PointerTable:
        """Return a table of only the first `count` slots, over the buffer up to their end, with the same views."""
        end = max((slot.offset + slot.numel for slot in self.slots[:count]), default=0)
        table = PointerTable(self.flat[:end], self.slots[:count], self.dtype)
        table.views[:] = self.views[:count]
        return table

    # The next two are made on first use. They hold no reference to the table: a cycle would keep `flat` allocated until
    # the garbage collector runs.

    @cached_property
    def launcher(self) -> Launcher:
        """Runs kernels over this table."""
        return Launcher(self)

    @cached_property
    def host_plan(self) -> HostPlan:
        """Runs torch's own operations over this table."""
        return HostPlan(self)
