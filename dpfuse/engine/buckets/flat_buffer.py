"""The memory of one bucket: which gradient lies where in it. Knows no collective and no order of events."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine import registered_memory
from dpfuse.engine.averaging import Averaging, real_dtype
from dpfuse.engine.memory_order import dense_stride, real_layout
from dpfuse.engine.plan import Bucket, Slot, lay_out_slots
from dpfuse.engine.report import Tail
from dpfuse.engine.streams import capturing
from dpfuse_kernels import PointerTable
from dpfuse_kernels import Slot as KernelSlot

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """A flat buffer with a place for the gradient of each parameter, and for a tail; made when it is first needed.

    Args:
        bucket: the plan of what lies in it.
        params: its parameters, in that order; on one device.
        names: their names, for errors.
        group: process group that sends it.
        averaging: the dtype that travels.
        views: whether `.grad` becomes a view of the buffer, where that dtype is the gradients'.
        tail: what lies behind the last gradient, if anything.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        averaging: Averaging,
        *,
        views: bool,
        tail: Tail | None,
    ) -> None:
        self.fused_params = list(params)
        self.tail = tail
        self.registered = False  # whether the buffer is to lie in memory that the group's back end has registered
        self._fused = bucket
        self._names = names
        self._group = group
        self._averaging = averaging
        self._keep_views = views and averaging.dtype == real_dtype(bucket.dtype)
        self._shapes = [(tuple(param.shape), dense_stride(param)) for param in params]  # when they were planned
        self._is_complex = bucket.dtype != real_dtype(bucket.dtype)
        self._table: PointerTable | None = None
        self._untailed: PointerTable | None = None
        self._views: list[Tensor] = []  # what gradients become: the table's views, as complex numbers where they are

    @property
    def untailed(self) -> PointerTable | None:
        """Where the gradients of `fused_params` lie, without the tail; None before the first launch."""
        if self._table is None or not self.fused_params:
            return None
        if self._untailed is None or self._untailed.address != self._table.address:
            self._untailed = self._table.first(len(self.fused_params))
        return self._untailed

    def _hand_out_views(self, but: Collection[int]) -> None:
        """Make `.grad` of all parameters, but for those registration indices, their view of the buffer."""
        assert self._table is not None
        views = self._views
        if list(map(Tensor.data_ptr, views)) != self._table.addresses:
            # Somebody assigned to `.grad.data`, which took a view that was handed out elsewhere.
            self._table.views[:] = self._table.new_views()
            views[:] = self._gradient_views(self._table)
        if not but:
            for param, view in zip(self.fused_params, views, strict=False):  # the tail's belongs to nobody
                param.grad = view
            return
        for param, index, view in zip(self.fused_params, self._fused.params, views, strict=False):
            if index not in but:
                param.grad = view

    def _target(self, place: int) -> Tensor:
        """The gradient of a parameter, to be written: a new one where there is none, real where it is complex."""
        assert self._table is not None
        param = self.fused_params[place]
        if param.grad is None or param.grad.is_conj():
            shape, stride = self._shapes[place]
            dtype = getattr(torch, self._fused.dtype)
            param.grad = torch.empty_strided(shape, stride, dtype=dtype, device=self._table.flat.device)
        return torch.view_as_real(param.grad) if self._is_complex else param.grad

    def _allocate(self) -> PointerTable:
        # Not before the first launch: after a rebuild the gradients of the step before may still live in
        # the buffers of the plan before.
        # Of the planned type, whatever became of the parameters: the peers keep to the plan.
        dtype = getattr(torch, real_dtype(self._fused.dtype))
        places, numel = self._places()
        slots = [
            KernelSlot(name, place.offset, *(real_layout(shape, stride) if self._is_complex else (shape, stride)))
            for name, place, (shape, stride) in zip(self._names, places, self._shapes, strict=True)
        ]
        if self.tail is not None:
            slots.append(KernelSlot("dpfuse's tail", numel, (self.tail.numel,), (1,)))
            numel += self.tail.numel
        self._table, self._untailed = self._new_table(numel, slots, dtype), None
        self._views = self._gradient_views(self._table)
        return self._table

    def _new_table(self, numel: int, slots: Sequence[KernelSlot], dtype: torch.dtype) -> PointerTable:
        return PointerTable(self._zeros(numel, getattr(torch, self._averaging.dtype)), slots, dtype)

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        device = torch.device(self._fused.device)
        # A graph has a pool of its own for what is allocated while it is captured.
        if not self.registered or capturing():
            return torch.zeros(numel, dtype=dtype, device=device)
        return registered_memory.zeros(numel, dtype=dtype, device=device, group=self._group)

    def _gradient_views(self, table: PointerTable) -> list[Tensor]:
        if not self._is_complex or not self._keep_views:
            return table.views
        count = len(self.fused_params)
        return [*map(torch.view_as_complex, table.views[:count]), *table.views[count:]]

    def _places(self) -> tuple[list[Slot], int]:
        """Where each gradient lies in the buffer, in the order of the parameters, and the buffer's length."""
        # Not the plan's: elements of another size start elsewhere.
        return lay_out_slots(
            [(slot.param, self._width * slot.numel) for slot in self._fused.slots], self._averaging.dtype
        )

    @property
    def _width(self) -> int:
        """Numbers in the buffer for each element of a gradient."""
        return 2 if self._is_complex else 1
