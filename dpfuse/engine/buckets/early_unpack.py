"""Unpacks private gradients on a side stream as each bucket lands. Knows streams and works, no bucket and no order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine import collective
from dpfuse.engine.ownership import is_private
from dpfuse.engine.streams import capturing

__all__ = ["LEAST", "EarlyGradients", "SideStream", "side_stream_on"]

LEAST = 64 << 10  # bytes of a bucket's mean gradient; for smaller ones the host looks longer than the copy takes

_orphans: list[tuple[Any, list[object]]] = []  # events, and what must not be freed before them


class SideStream:
    """One stream beside that of backward, and all that what was queued there reads and writes.

    Whoever queues calls `join` before anybody else touches what is written, at the end of backward. If it comes to no
    `join`, since the backward died and the model with it, the memory still outlives what was queued.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._held: list[object] = []
        finalize(self, _outlive, self._held, self._stream).atexit = False

    def queue(self, work: dist.Work, unpack: Callable[[], None], held: Sequence[object]) -> bool:
        """Have `unpack` run behind `work`, and behind all that `work` waits for; the current stream goes on.

        Args:
            work: a collective, whose `wait` orders the current stream behind it.
            unpack: queues kernels on the current stream.
            held: owners of all memory that these read and write; nobody else may, until `join`.

        Returns:
            Whether it was queued as a whole; if not, whoever delivers in its place meets the error again.
        """
        self._held += held
        try:
            with self._module.stream(self._stream), torch.no_grad():
                work.wait()
                unpack()
        except (ValueError, RuntimeError):
            return False
        return True

    def join(self) -> None:
        """Let the current stream wait for all that was queued."""
        if self._held:
            self._module.current_stream(self._device).wait_stream(self._stream)
            self._held.clear()


def side_stream_on(group: dist.ProcessGroup, device: torch.device) -> SideStream | None:
    """A new one; None where waiting for a collective of `group` would keep the host from going on with backward."""
    return SideStream(device) if collective.waits_on_streams(group, device) else None


class EarlyGradients:
    """The gradients of one bucket that were unpacked while backward went on, until they are delivered.

    Args:
        params: of the bucket, by place.
        side: where they are unpacked.
    """

    def __init__(self, params: Sequence[Tensor], side: SideStream) -> None:
        self._params = params
        self._written: list[tuple[Tensor, int]] = []  # gradients and their addresses, by place
        self.join = side.join
        self._side = side

    def write(
        self, work: dist.Work, grads: Sequence[Tensor], unpack: Callable[[Sequence[Tensor]], None], memory: object
    ) -> None:
        """Have `unpack` write all these gradients as soon as `work` is done, if nobody else has or awaits any of them.

        Args:
            work: of the bucket.
            grads: those that it carries, by place.
            unpack: called with them.
            memory: owner of what it reads.
        """
        # The backward that goes on may still read memory that a gradient shares, and another hook the gradient.
        private = all(map(_is_unheard, self._params)) and all(map(is_private, grads))
        if private and not capturing() and self._side.queue(work, lambda: unpack(grads), [memory, *grads]):
            self._written = [(grad, grad.data_ptr()) for grad in grads]

    def delivered(self) -> set[int]:
        """The places whose gradient is still the one that was written, where it was then; forgets them."""
        written, self._written = self._written, []
        return {
            place
            for place, (param, (grad, address)) in enumerate(zip(self._params, written, strict=bool(written)))
            if param.grad is grad and grad.data_ptr() == address
        }

    def lose(self) -> None:
        """Zero what was written: its owner may have zeroed it already, before the peers' part landed in it."""
        written = [grad for grad, _ in self._written]
        for place in self.delivered():
            written[place].zero_()


def _is_unheard(param: Tensor) -> bool:
    """Is our hook the only one that is called with the accumulated gradient?"""
    return len(param._post_accumulate_grad_hooks or ()) <= 1


def _outlive(held: list[object], stream: Any) -> None:
    """Keep what nobody joined until the stream is done with it."""
    _orphans[:] = [(event, owners) for event, owners in _orphans if not event.query()]
    if held:
        _orphans.append((stream.record_event(), list(held)))
