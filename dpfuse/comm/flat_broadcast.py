"""Overwrites many tensors with those of one rank, in one broadcast. Knows no gradient and no module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm.abilities import abilities_of
from dpfuse.comm.collective import group_device, start_broadcast
from dpfuse.comm.waiting import board_of, finish

__all__ = ["FlatBroadcast", "broadcast_flat"]

Write = Callable[[list[Tensor]], None]
Look = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
ALIGNMENT = 16  # bytes; the largest element, complex128
LEAVE_WITHIN = timedelta(seconds=60)
BROADCAST_BYTES = 250 << 20  # bytes fused into one broadcast, so that a large model needs no second copy of itself


class FlatBroadcast:
    """Overwrites tensors with those of one rank of the group, all in one broadcast, as often as it is called.

    They travel as bytes, through a staging buffer that is kept.

    Args:
        tensors: of any dtypes, shapes and strides, on one device; these are the same on all ranks.
        writer: gets the tensors in some order, and returns what writes values in that order; None copies them.

    Attributes:
        values: what was sent or received last, one for each tensor, in the staging buffer; zeros before.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup,
        writer: Callable[[Sequence[Tensor]], Write] | None = None,
    ) -> None:
        self._group = group
        self._board = board_of(group)
        # A group that also has a back end for CPUs, as by default, would send them through the host.
        on_gpu = bool(tensors) and abilities_of(group, tensors[0].device).on_streams
        self._device = tensors[0].device if on_gpu else group_device(group)
        kinds: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, min(tensor.dim(), 2)), []).append(tensor)
        counts = [sum(tensor.numel() for tensor in same) for same in kinds.values()]
        # The bytes of a dtype must start at an address that its elements may have.
        sizes = [
            -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, (dtype, _) in zip(counts, kinds, strict=True)
        ]
        # As bytes, since some back ends cannot send some dtypes (bool, complex, float8).
        device = tensors[0].device if tensors else self._device
        self._staging = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._joined: list[tuple[list[Tensor], Tensor]] = []  # flat tensors, which one call can pack
        self._scalars: list[tuple[_Scalars, Tensor]] = []
        staged_at: dict[int, Tensor] = {}  # by the id of a tensor; equal tensors have equal values
        self._others: list[tuple[list[Tensor], list[Tensor]]] = []
        self._targets: list[Tensor] = []
        self._pieces: list[Tensor] = []
        self._sends = False
        self._pending: tuple[Tensor, dist.Work] | None = None  # what travels, started and not finished
        self._sent: list[dist.Work] = []  # not waited for
        weakref.finalize(self, _wait_for_peers, self._sent)
        for ((dtype, dims), same), chunk, count in zip(kinds.items(), self._staging.split(sizes), counts, strict=True):
            staged = chunk[: count * dtype.itemsize].view(dtype)
            parts = staged.split([tensor.numel() for tensor in same])
            pieces = [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)]
            if dims == 0:
                self._scalars.append((_Scalars(same), staged))
            elif dims == 1:
                self._joined.append((same, staged))
            else:
                self._others.append((pieces, same))
            self._targets += same
            self._pieces += pieces
            staged_at.update(zip(map(id, same), pieces, strict=True))
        self.values = [staged_at[id(tensor)] for tensor in tensors]
        self._write = partial(_copy, self._targets) if writer is None else writer(self._targets)

    def __call__(self, source: int = 0, *, wait: bool = True) -> None:
        """Overwrite the tensors with those of rank `source`.

        Args:
            wait: if False, that rank goes on while its bytes travel, on a CPU; its next call or its end waits.
        """
        self.start(source)
        self.finish(wait=wait)

    def start(self, source: int) -> None:
        """Start to overwrite the tensors with those of rank `source` as they are now; `finish` must follow.

        Raises:
            RuntimeError: a tensor has got another number of elements since this was made; nothing was sent.
        """
        if not self._staging.numel():
            return
        while self._sent:
            finish(self._sent.pop(), self._board, self._device.type)
        self._sends = self._group.rank() == source
        # Inference mode makes many small copies cheaper, and still counts the versions of what is written.
        with torch.inference_mode():
            if self._sends:
                self._stage()
            wire = self._staging.to(self._device)
            self._pending = wire, start_broadcast(wire, self._group, source)

    def stage(self) -> None:
        """Copy the tensors as they are now to `values`, and send nothing."""
        with torch.inference_mode():
            self._stage()

    def _stage(self) -> None:
        for tensors, staged in self._joined:
            _join(tensors, staged)
        for scalars, staged in self._scalars:
            _join(scalars.vectors(), staged)
        for pieces, tensors in self._others:
            torch._foreach_copy_(pieces, tensors)

    def finish(self, *, wait: bool = True, look: Look | None = None) -> None:
        """Wait for what was started, if anything was.

        Args:
            wait: as in a call of this object.
            look: gets the tensors and the values that have arrived for them, before these are written.
        """
        if self._pending is None:
            return
        wire, work = self._pending
        if self._sends and not wait and not wire.is_cuda:  # there it costs nothing, and a graph being captured needs it
            self._pending = None
            self._sent.append(work)
            return
        finish(work, self._board, self._device.type)
        self._pending = None
        if not self._sends:
            if wire is not self._staging:
                self._staging.copy_(wire)
            for scalars, _ in self._scalars:
                scalars.forget()
            if look is not None:
                look(self._targets, self._pieces)
            self._write(self._pieces)


def _join(tensors: list[Tensor], staged: Tensor) -> None:
    """Write vectors to the staging buffer, which `cat` would give another size where one of them has grown."""
    found = sum(map(Tensor.numel, tensors))
    if found != staged.numel():
        raise RuntimeError(f"tensors to be sent have {found} elements now, expected {staged.numel()} as planned")
    torch.cat(tensors, out=staged)


def _copy(tensors: list[Tensor], values: list[Tensor]) -> None:
    with torch.inference_mode():  # writes to tensors that were made in this mode, too
        torch._foreach_copy_(tensors, values)


class _Scalars:
    """Tensors without dimensions, such as the counters of batch norm, as vectors that one call can pack."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._addresses: list[int] = []
        self._vectors: list[Tensor] = []

    def vectors(self) -> list[Tensor]:
        addresses = list(map(Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:  # the first time, and where code has assigned to `.data`
            self._addresses = addresses
            self._vectors = [tensor.detach().view(1) for tensor in self._tensors]
        return self._vectors

    def forget(self) -> None:
        """Keep no vectors, which hold the memory of the tensors."""
        self._addresses, self._vectors = [], []


def _wait_for_peers(sent: list[dist.Work]) -> None:
    """Wait until the peers have what was sent. It would be lost if the process ended before."""
    for work in sent:
        with suppress(RuntimeError):  # a peer that has ended, or hangs: its own error says more
            work.wait(LEAVE_WITHIN)


def broadcast_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite `tensors` (any dtypes, shapes and strides, one device) with those of rank `source`, once."""
    batch, nbytes = [], 0
    for tensor in tensors:
        batch.append(tensor)
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= BROADCAST_BYTES:
            FlatBroadcast(batch, group)(source)
            batch, nbytes = [], 0
    if batch:
        FlatBroadcast(batch, group)(source)
