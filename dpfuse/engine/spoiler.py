"""Makes gradients NaN on the device while the host cannot know what the peers report. Knows no report, no bucket."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.param_spec import grad_dtype_of
from dpfuse_kernels import SpoilTable, spoil
from dpfuse_kernels.known_tensors import Seen

__all__ = ["Spoiler", "spoiler_of"]

_grad_of = attrgetter("grad")


class Spoiler:
    """Fills the gradients of some parameters with NaN where numbers on the device say that they are wrong.

    On CUDA the host reads the report of the peers one step later. Until then, NaN keeps such gradients from being used.

    Args:
        params: whose gradients are averaged.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._layouts: list[Seen] = []  # of the communication buffers filled last: it holds no memory
        self._buffer_kinds: list[tuple[SpoilTable, list[int]]] = []  # with the places of the buffers
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for param in params:
            kinds.setdefault((grad_dtype_of(param), param.device), []).append(param)
        self._kinds = [
            (SpoilTable([_width(param) * param.numel() for param in alike], dtype.to_real(), device), alike)
            for (dtype, device), alike in kinds.items()
        ]

    def __call__(self, pairs: Tensor, copy: tuple[Tensor, Tensor] | None = None) -> None:
        """Make their gradients NaN if both numbers of a pair differ from zero. The host does not wait.

        Args:
            pairs: [2 * pairs], on the device of the report.
            copy: what is copied besides, from that device, as `dpfuse_kernels.spoil` takes it.
        """
        for table, params in self._kinds:
            grads: list[Tensor | None] = list(map(_grad_of, params))
            if params[0].is_complex():
                grads = [*map(_real, grads)]
            copy = self._spoil(table, grads, pairs, copy)
        _copy(copy)

    def fill_buffers(
        self, buffers: Sequence[CommBuffer], pairs: Tensor, copy: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """As a call, where all gradients lie in these communication buffers, whose few addresses do not change.

        Args:
            buffers: of all gradients.
            pairs: as for a call.
            copy: as for a call.
        """
        layouts = [buffer.gradients.seen for buffer in buffers]
        if layouts != self._layouts:
            self._layouts, self._buffer_kinds = layouts, _tables_of(buffers)
        for table, places in self._buffer_kinds:
            copy = self._spoil(table, [buffers[place].gradients.flat for place in places], pairs, copy)
        _copy(copy)

    def _spoil(
        self, table: SpoilTable, tensors: list[Tensor | None], pairs: Tensor, copy: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Fill the tensors of one table, and return what is still to be copied."""
        if table.device != pairs.device:
            spoil(table, tensors, pairs.to(table.device))
            return copy
        spoil(table, tensors, pairs, copy)
        return None


def spoiler_of(params: Sequence[Tensor], world_size: int) -> Spoiler | None:
    """Return a guard if one is needed: on a CPU errors are raised in the same backward; one rank has no peers."""
    return Spoiler(params) if params[0].device.type == "cuda" and world_size > 1 else None


def _copy(copy: tuple[Tensor, Tensor] | None) -> None:
    """Copy what no launch has copied, since no gradient lies on the device of the report."""
    if copy is not None:
        copy[1].copy_(copy[0], non_blocking=True)


def _tables_of(buffers: Sequence[CommBuffer]) -> list[tuple[SpoilTable, list[int]]]:
    """Return a table for the buffers of each dtype and device, and their places. Gaps between gradients are kept."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, buffer in enumerate(buffers):
        kinds.setdefault((buffer.table.dtype, buffer.flat.device), []).append(place)
    tables = []
    for (dtype, device), places in kinds.items():
        alike = [buffers[place].gradients for place in places]
        spans = [[(slot.offset, slot.numel) for slot in gradients.slots] for gradients in alike]
        table = SpoilTable([gradients.flat.numel() for gradients in alike], dtype, device, spans=spans)
        tables.append((table, places))
    return tables


def _width(param: Tensor) -> int:
    return 2 if param.is_complex() else 1


def _real(grad: Tensor | None) -> Tensor | None:
    """Return a complex gradient as pairs of real numbers, without resolving a lazy conjugate."""
    if grad is None or not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
