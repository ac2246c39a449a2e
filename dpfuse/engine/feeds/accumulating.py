"""A communication buffer adds gradients up over the batches of a window, while backwards are not synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine import messages
from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feeds.at_once import AtOnce
from dpfuse.engine.optimizer_step_hook import call_before_steps
from dpfuse.engine.param_spec import grad_dtype_of
from dpfuse.engine.protocols import Feed, PackArguments
from dpfuse.engine.streams import WritingStreams, capturing
from dpfuse.engine.sync_decision import Window
from dpfuse.engine.torch_private import Hooks, leave_untraced, ranged_without_graph
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError
from dpfuse_kernels import flatten
from dpfuse_kernels.multiply import multiply_each

__all__ = ["Accumulating", "Accumulation", "refuse_accumulated"]


class Accumulating(Feed):
    """Adds up the gradients of a window in the buffer, so that they need no other memory.

    The first gradients of a window overwrite the buffer, as every pack does. Later ones are added, scaled in the same
    way, in the dtype of the buffer. `pack` adds what is in `.grad` at the end, and `sent` ends the window.

    Args:
        buffer: of the bucket.
        hooks: of its parameters.
        writers: the streams that write its gradients, on CUDA.
        label: for errors and profiles.

    Attributes:
        held: registration indices of the parameters whose gradients are partly in the buffer.
    """

    WHY = "where backwards inside no_sync() have accumulated them (accumulate_in_buckets=True)"
    REMEDY = (
        "Run the last backward of the window outside of no_sync(), throw the window away with discard_accumulated(), "
        "or leave accumulate_in_buckets out."
    )

    takes_parts = True  # whether a gradient may be taken while more of it comes in the same backward

    def __init__(self, buffer: CommBuffer, hooks: Hooks, writers: WritingStreams | None, label: str) -> None:
        self.held: set[int] = set()
        self._buffer = buffer
        self._at_once = AtOnce(buffer)
        self._hooks = hooks
        self._writers = writers
        self._label = label
        self._sources: list[Tensor | None] = []
        call_before_steps(self)

    def take(self, *, backward_ended: bool) -> None:
        """Add what is in `.grad` to the buffer, and leave None there.

        Args:
            backward_ended: whether backward has ended. Before, nothing is taken if other hooks still have to read it.

        Raises:
            DPFuseError: a CUDA graph is being captured; a gradient is the buffer itself.
            ValueError: a gradient does not fit its parameter; the text names it.
        """
        if backward_ended:
            self._sources = []  # all streams are in order by now
        elif not self._hooks.are_ours:
            return
        buffer = self._buffer
        grads: list[Tensor | None] = [param.grad for param in buffer.params]
        if all(grad is None for grad in grads):
            return
        if capturing():
            raise DPFuseError(_captured(self._label))
        several_streams = self._writers is not None and self._writers.precede()
        with ranged_without_graph("dpfuse::accumulate", self._label):
            arguments = PackArguments(buffer.gradients, (), buffer.averaging.pre_scale)
            self.pack(grads, arguments)
        self.held.update(i for i, grad in zip(buffer.indices, grads, strict=True) if grad is not None)
        _filled[self] = None
        if several_streams:  # else the allocator reuses their memory only after all reads on this stream
            self._sources = [*self._sources, *grads]
        for param in buffer.params:
            param.grad = None

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        buffer = self._buffer
        if not self.held:
            self._at_once.pack(grads, arguments)
            return
        if capturing():
            raise DPFuseError(_captured(self._label))
        views = buffer.gradients.views
        for name, grad, view in zip(buffer.names, grads, views, strict=True):
            if grad is not None and _same_memory(grad, view):
                raise DPFuseError(
                    f"the gradient of parameter {name!r} is a view of the buffer in which its gradients are being "
                    "accumulated, kept from the step before; expected None or a tensor of its own. Leave .grad alone "
                    "until the synchronised backward, or assign a clone before the first backward inside no_sync()."
                )
        if arguments.factor is not None:  # it multiplies all that is averaged
            multiply_each(views, arguments.factor)
        if buffer.dtype.is_complex:
            grads = [None if grad is None else torch.view_as_real(grad.resolve_conj()) for grad in grads]
        if arguments.report is not None:
            buffer.report.zero_()  # since the report is added, too
            grads = [*grads, arguments.report]
        flatten(
            grads,
            arguments.table,
            scale=arguments.scale,
            counts=arguments.counts,
            factor=arguments.factor,
            accumulate=True,
        )

    def sent(self) -> None:
        self.forget()

    def forget(self) -> int:
        """Drop the accumulated gradients, and return how many parameters had one."""
        count = len(self.held)
        self.held.clear()
        _filled.pop(self, None)
        return count

    def release(self) -> None:
        """Move the accumulated gradients into `.grad`.

        Raises:
            DPFuseError: a parameter has got another shape.
        """
        if not self.held:
            return
        buffer = self._buffer
        grads: list[Tensor | None] = [
            torch.empty_strided(shape, stride, dtype=buffer.dtype, device=buffer.flat.device)
            if index in self.held
            else None
            for index, (shape, stride) in zip(buffer.indices, buffer.shapes, strict=True)
        ]
        with torch.no_grad():
            targets = [torch.view_as_real(g) if g is not None and buffer.dtype.is_complex else g for g in grads]
            buffer.unpack(targets, scale=1.0 / buffer.averaging.pre_scale, matched=False)
            for param, name, grad in zip(buffer.params, buffer.names, grads, strict=True):
                if grad is None:
                    continue
                if param.shape != grad.shape:
                    raise DPFuseError(
                        f"parameter {name!r} has shape {tuple(param.shape)}, expected {tuple(grad.shape)} as when its "
                        "gradients were accumulated in their bucket. Change it between a synchronised backward and the "
                        "next no_sync(), or call discard_accumulated() before."
                    )
                grad = grad.to(param.device, grad_dtype_of(param))
                param.grad = grad if param.grad is None else param.grad + grad
        self.forget()

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise DPFuseError if the optimizer steps on parameters whose gradients are in a bucket and not in `.grad`."""
        if self.held:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            refuse_accumulated(params, f"{type(optimizer).__name__}.step() was called")

    def holds_of(self, wanted: set[int]) -> str | None:
        """Return the name of a parameter in `wanted` (ids) whose gradient is held; None if there is none."""
        buffer = self._buffer
        for index, param, name in zip(buffer.indices, buffer.params, buffer.names, strict=True):
            if index in self.held and id(param) in wanted:
                return name
        return None


class Accumulation:
    """Counts the backwards that are not synchronised, and lets the feeds that accumulate take their gradients.

    The order does not matter, and no gradient is too late: what is ready after its bucket was taken is taken later.

    Args:
        feeds: those that accumulate, by the place of their bucket in the order of communication.
        window: counts such backwards.

    Attributes:
        takes_parts: whether a gradient may be taken while more of it comes in the same backward.
    """

    def __init__(self, feeds: dict[int, Accumulating], window: Window) -> None:
        self.feeds = feeds
        self.takes_parts = all(feed.takes_parts for feed in feeds.values())
        self._window = window

    def ready(self, order: int) -> None:
        """Take the gradients of a bucket that is complete, while backward goes on."""
        if order in self.feeds:
            self.feeds[order].take(backward_ended=False)

    leave_untraced(ready, calls=True, reason="dpfuse accumulates gradients here")

    def finish(self, orders: Iterable[int]) -> None:
        """Take what is left of these buckets, whose gradients became ready, at the end of the backward.

        Raises:
            DPFuseError, ValueError: a gradient cannot be taken; the window is dropped.
        """
        try:
            for order in orders:
                if order in self.feeds:
                    self.feeds[order].take(backward_ended=True)
        except BaseException:
            self.die()
            raise
        self._window.backward_ends()

    def die(self) -> None:
        """Begin the window again, since an exception ended the backward. Warn if buckets lose gradients."""
        self._window.backward_dies()
        if lost := self.forget():
            warn_at_user(messages.discarded(lost))

    def begin_again(self) -> None:
        """Drop what the buckets have taken, and begin the window again if that was anything."""
        if self.forget():
            self._window.begin_again()

    def release(self) -> None:
        """Put what the buckets have taken back into `.grad`."""
        for feed in self.feeds.values():
            feed.release()

    def forget(self) -> int:
        """Drop what the buckets have taken, and return for how many parameters that was."""
        return sum(feed.forget() for feed in self.feeds.values())


_filled: WeakKeyDictionary[Accumulating, None] = WeakKeyDictionary()  # feeds that hold something


def refuse_accumulated(params: Sequence[Tensor], what: str) -> None:
    """Raise DPFuseError where gradients of `params` are in a bucket and not in `.grad`; `what` needs them there."""
    if not _filled:
        return
    wanted = set(map(id, params))
    for reference in _filled.keyrefs():  # a copy, since other threads may fill buckets meanwhile
        feed = reference()
        if feed is not None and (name := feed.holds_of(wanted)) is not None:
            raise DPFuseError(
                f"{what} while gradients of parameter {name!r} lie in its bucket, {feed.WHY}, and not in .grad; "
                f"expected a synchronised backward before. {feed.REMEDY}"
            )


def _same_memory(grad: Tensor, view: Tensor) -> bool:
    """Whether both begin at the same address. They may be different tensors, as after `detach()`."""
    return grad.layout is torch.strided and grad.numel() > 0 and grad.data_ptr() == view.data_ptr()


def _captured(label: str) -> str:
    return (
        f"{label} has to accumulate gradients while a CUDA graph is captured, where a replay would overwrite what the "
        "one before has left; expected none inside no_sync(). Leave accumulate_in_buckets out, or run no_sync() "
        "outside of graphs."
    )
