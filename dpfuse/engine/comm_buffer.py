"""The communication buffer of a bucket: the slot of each gradient, and the views of it. Knows no collective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfuse.engine.averaging import Averaging, real_dtype
from dpfuse.engine.plan import Bucket, lay_out_slots
from dpfuse_kernels import PointerTable, flatten, unflatten
from dpfuse_kernels import Slot as KernelSlot
from dpfuse_kernels.layout import TransposeCheck

__all__ = ["PLAIN", "CommBuffer", "Format", "Zeros", "dense_stride", "zeros_on"]

Zeros = Callable[[int, torch.dtype], Tensor]  # elements and dtype -> a flat tensor of zeros


class Format(Protocol):
    """How gradients are written in a communication buffer."""

    def places(self, numels: Sequence[int], room: int, dtype: str) -> tuple[list[int], int]:
        """Return the offset of each gradient, and the offset of `room` elements after them; all in elements."""

    def table(
        self, zeros: Zeros, numel: int, wire: str, slots: Sequence[KernelSlot], dtype: torch.dtype
    ) -> PointerTable:
        """Allocate a flat tensor with these slots."""

    def pack(
        self,
        tensors: Sequence[Tensor | None],
        table: Any,
        *,
        scale: float = 1.0,
        counts: Tensor | None = None,
        factor: Tensor | None = None,
        residual: Tensor | None = None,
        matched: bool = False,
    ) -> None:
        """Write gradients into a table that `table` has made. The arguments are those of `dpfuse_kernels.flatten`."""

    def unpack(self, table: PointerTable, targets: Sequence[Tensor | None], scale: float, matched: bool) -> None:
        """Write the gradients in the table to the targets."""


class _Plain:
    """Numbers of the dtype that travels, one slot after the other, aligned for 128-bit loads."""

    def places(self, numels: Sequence[int], room: int, dtype: str) -> tuple[list[int], int]:
        slots, length = lay_out_slots(enumerate(numels), dtype)
        return [slot.offset for slot in slots], length

    def table(
        self, zeros: Zeros, numel: int, wire: str, slots: Sequence[KernelSlot], dtype: torch.dtype
    ) -> PointerTable:
        return PointerTable(zeros(numel, getattr(torch, wire)), slots, dtype)

    pack = staticmethod(flatten)

    def unpack(self, table: PointerTable, targets: Sequence[Tensor | None], scale: float, matched: bool) -> None:
        unflatten(table, targets, scale=scale, matched=matched)


PLAIN: Format = _Plain()


class CommBuffer:
    """The flat memory in which a bucket travels: a slot for each gradient, and room for a report after them.

    The buffers of a module, in torch's sense, are something else.

    Args:
        bucket: the plan of what lies in it.
        params: its parameters, in that order; on one device.
        names: their names, for errors.
        averaging: the dtype that travels, and what packing multiplies with.
        room: elements of the report.
        zeros: allocates a flat tensor of zeros.
        format: how gradients are written.

    Attributes:
        indices: registration indices of the parameters.
        flat: all of the memory, [elements].
        storage, nbytes: the memory, and how much it had when its slots were laid out.
        table: of all slots, the report's among them; None of a buffer without any slot.
        gradients: the table of the gradients alone, for unpacking.
        report: the room for the report, [room]; after everything else.
        views: what `.grad` becomes: the slots, as complex numbers where the gradients are complex.

    Raises:
        RuntimeError: there is no memory left.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        names: Sequence[str],
        averaging: Averaging,
        *,
        zeros: Zeros,
        room: int = 0,
        format: Format = PLAIN,
    ) -> None:
        self.indices = bucket.params
        self.params = list(params)
        self.names = names
        self.averaging = averaging
        self.format = format
        self.shapes = [(tuple(param.shape), dense_stride(param)) for param in params]  # when they were planned
        self.dtype: torch.dtype = getattr(torch, bucket.dtype)
        numbers = [_pairs(*each) if self.dtype.is_complex else each for each in self.shapes]
        offsets, end = format.places([torch.Size(shape).numel() for shape, _ in numbers], room, averaging.dtype)
        slots = (
            [KernelSlot(*each) for each in zip(names, offsets, *zip(*numbers, strict=True), strict=True)]
            if params
            else []
        )
        if room:
            slots.append(KernelSlot("dpfuse's report", end, (room,), (1,)))
        # Of the planned dtype, even if parameters were converted since: the peers use the plan.
        real = getattr(torch, real_dtype(bucket.dtype))
        self._use(format.table(zeros, end + room, averaging.dtype, slots, real), room)

    @property
    def holds_gradients(self) -> bool:
        """Whether the numbers in it are the gradients' own, so that `.grad` can be a view."""
        return self.table.dtype == self.flat.dtype

    def unpack(self, targets: Sequence[Tensor | None], *, scale: float, matched: bool = True) -> None:
        """Copy the slots to these tensors, one per parameter or None."""
        self.format.unpack(self.gradients, targets, scale, matched)

    def hand_out_views(self, but: Collection[int]) -> None:
        """Make `.grad` of each parameter its view of the buffer, except at the registration indices in `but`."""
        # Where a program has changed its gradient in place: `param.grad.data = x`, or `param.grad.t_()`.
        moved = list(map(Tensor.data_ptr, self.views)) != self.gradients.addresses
        transposed = self._transposed  # asked in line, since each bucket comes here
        if (
            moved
            or not all(map(Tensor.is_contiguous, transposed.contiguous))
            or (transposed.others and transposed.fails())
        ):
            self._replace_views()
        if not but:
            try:
                for param, view in zip(self.params, self.views, strict=True):
                    param.grad = view
            except RuntimeError:  # it has another shape
                self._replace_views()
            else:
                return
        elif any(view.shape != shape for view, (shape, _) in zip(self.views, self.shapes, strict=True)):
            self._replace_views()
        for param, index, view in zip(self.params, self.indices, self.views, strict=True):
            if index not in but:
                param.grad = view

    def target(self, place: int) -> Tensor:
        """Return the gradient of a parameter, to be written; a new one if it has none. A complex one is a real view."""
        param = self.params[place]
        if param.grad is None or param.grad.is_conj():
            shape, stride = self.shapes[place]
            param.grad = torch.empty_strided(shape, stride, dtype=self.dtype, device=self.flat.device)
        return torch.view_as_real(param.grad) if self.dtype.is_complex else param.grad

    def follow_flat(self) -> None:
        """Use the slots in the new memory that the flat tensor has got."""
        self._use(PointerTable(self.flat, self.table.slots, self.table.dtype), self.report.numel())

    def restore(self) -> None:
        """Get memory again after a program has freed or moved it, as by `param.grad.untyped_storage().resize_(0)`.

        Raises:
            RuntimeError: there is no memory left, or the memory cannot be resized.
        """
        storage = self.storage
        nbytes = int(self.flat.storage_offset() + self.flat.numel()) * self.flat.element_size()
        if storage.nbytes() < nbytes:
            storage.resize_(nbytes)
            self.clear()
        self.follow_flat()
        self.table.clear_gaps()

    def renew(self) -> None:
        """Use new, ordinary memory. The old memory stays with the gradients that a program holds.

        Raises:
            RuntimeError: there is no memory left; nothing has changed.
        """
        old, zeros = self.table, zeros_on(str(self.flat.device))
        new = self.format.table(zeros, self.flat.numel(), self.averaging.dtype, old.slots, old.dtype)
        self._use(new, self.report.numel())

    def _use(self, table: PointerTable, room: int) -> None:
        self.table, self.flat = table, table.flat
        self.storage = self.flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.gradients = table.first(len(self.params)) if room else table
        self.views: list[Tensor] = self._gradients_of(table.views)
        self._transposed = TransposeCheck(self.views)
        self.report = self.flat[self.flat.numel() - room :]

    def views_in(self, memory: Tensor) -> list[Tensor]:
        """Return a new view of `memory`, an alias of `flat`, for each gradient."""
        slots = self.table.slots[: len(self.params)]
        return self._gradients_of([memory.as_strided(slot.shape, slot.stride, slot.offset) for slot in slots])

    def clear(self) -> None:
        """Fill the whole buffer with zeros, as a bucket without gradients sends it."""
        self.flat.zero_()

    def clear_gradients(self) -> None:
        """Fill the gradients with zeros, but not the report, which is still to be read."""
        self.gradients.flat.zero_()

    def serves(self, bucket: Bucket, params: Sequence[Tensor], wire: str, room: int, format: Format) -> bool:
        """Whether a bucket with these arguments can use this memory: the same gradients lie in the same places."""
        return (
            bool(params)
            and self.indices == bucket.params
            and list(map(id, self.params)) == list(map(id, params))
            and self.shapes == [(tuple(param.shape), dense_stride(param)) for param in params]
            and self.dtype == getattr(torch, bucket.dtype)
            and self.averaging.dtype == wire
            and self.flat.device.type == torch.device(bucket.device).type
            and self.report.numel() == room
            and self.format == format
        )

    def _replace_views(self) -> None:
        self.gradients.views[:] = self.gradients.new_views()
        self.table.views[: len(self.params)] = self.gradients.views
        self.views = self._gradients_of(self.gradients.views)
        self._transposed = TransposeCheck(self.views)

    def _gradients_of(self, views: Sequence[Tensor]) -> list[Tensor]:
        views = list(views[: len(self.params)])
        return [*map(torch.view_as_complex, views)] if self.dtype.is_complex and self.holds_gradients else views


def zeros_on(device: str) -> Zeros:
    """Return an allocator of ordinary memory on `device`."""
    return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's if it is dense, else C-contiguous."""
    if type(param) is not Tensor:  # a class may know no operation, and only sizes count
        with torch._C.DisableTorchFunctionSubclass():
            param = torch.empty_strided(param.shape, param.stride(), device="meta")
    return torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()


def _pairs(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of complex numbers as pairs of real ones."""
    return (*shape, 2), (*(2 * step for step in stride), 1)
