"""How reduced gradients get out of a communication buffer: they lie in it, or are copied. Knows no exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from functools import partial
from operator import attrgetter, is_

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.protocols import Delivery
from dpfuse.engine.renewed_memory import RenewedMemory
from dpfuse.engine.streams import SideStream, capturing
from dpfuse.engine.torch_private import Hooks, are_private, no_graph, ranged

__all__ = ["LEAST", "EarlyPrivate", "Private", "RenewedViews", "Views"]

_grad_of = attrgetter("grad")
LEAST = 1 << 20  # bytes of a bucket's mean gradient; for smaller ones the checks of the host take longer than the copy


class Views(Delivery):
    """`.grad` is a view of the buffer.

    Views are handed out when the buffer is sent, so that private gradients are freed while backward goes on. Where
    another hook still has to read an accumulated gradient, they are handed out at the end.

    Args:
        buffer: holds the gradients as they are.
        hooks: of its parameters.
    """

    gives_views = True

    def __init__(self, buffer: CommBuffer, hooks: Hooks) -> None:
        self.handed_out = False
        self._buffer = buffer
        self._hooks = hooks

    def hand_out_early(self, missing: Set[int]) -> None:
        """Make `.grad` of each parameter its view if no other hook reads it, except for the missing ones."""
        self.handed_out = self._hooks.are_ours
        if self.handed_out:
            self._buffer.hand_out_views(missing)
        self.is_done = self.handed_out and not missing

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        """As `Delivery.deliver`. If views were handed out early, only the missing gradients are left."""
        if not self.handed_out:
            self._buffer.hand_out_views(untouched)
        elif missing:
            self._buffer.hand_out_views(set(self._buffer.indices).difference(missing).union(untouched))
        return not untouched or untouched.isdisjoint(self._buffer.indices)

    def discard(self) -> None:
        # A program may have zeroed a view before the sum with the peers landed in it.
        with torch.no_grad():
            self._buffer.clear_gradients()


class Private(Delivery):
    """Each gradient keeps its own memory, and the sum is copied there.

    Args:
        buffer: holds the gradients in any dtype.
        post_scale: multiplies what is copied.
        label: of the bucket, for profiles.
    """

    def __init__(self, buffer: CommBuffer, post_scale: float, label: str = "") -> None:
        self._buffer = buffer
        self._post_scale = post_scale
        self._label = label

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        buffer = self._buffer
        grads: list[Tensor | None] = list(map(_grad_of, buffer.params))
        if not untouched and not buffer.dtype.is_complex and type(None) not in set(map(type, grads)):
            self.copy_to(grads)
            return True
        for place, index in enumerate(buffer.indices):
            grads[place] = None if index in untouched else buffer.target(place)
        self.copy_to(grads)
        return type(None) not in set(map(type, grads))

    def copy_to(self, targets: list[Tensor | None]) -> None:
        """Copy the buffer to these gradients, one per parameter; None is skipped."""
        with no_graph(), ranged("dpfuse::unpack", self._label):
            try:
                self.copy_now(targets)
            except Exception:
                # The gradient can be read but not written, such as an expanded one that a program has assigned. Or
                # memory was short for a moment. Every copy can be made again.
                for place, target in enumerate(targets):
                    if target is not None:
                        self._buffer.params[place].grad = None
                        targets[place] = self._buffer.target(place)
                self.copy_now(targets, matched=False)

    def copy_now(self, targets: Sequence[Tensor | None], *, matched: bool = True) -> None:
        """Copy as `copy_to` does, without a second attempt."""
        self._buffer.unpack(targets, scale=self._post_scale, matched=matched)


class RenewedViews(Delivery):
    """`.grad` lies in the buffer, and is private: the buffer gets new memory while a program holds a gradient.

    If a program has assigned other memory to `.grad`, the mean is copied there. Gradients are handed out when `Views`
    are.

    Args:
        hooks: of the parameters.
        memory: of the buffer.
        private: copies from the buffer.
    """

    def __init__(self, hooks: Hooks, memory: RenewedMemory, private: Private) -> None:
        self.handed_out = False
        self._hooks = hooks
        self._memory = memory
        self._private = private
        self._elsewhere: Sequence[int] = ()  # places of gradients that stay where they are

    def prepare(self, grads: list[Tensor | None], *, complete: bool) -> None:
        self.handed_out = self._hooks.are_ours
        self._memory.before_write(lists=1)
        if self.handed_out:
            self._elsewhere = self._memory.elsewhere(grads, complete=complete)
        else:
            self._elsewhere = range(len(grads))  # until the end: another hook reads what was accumulated

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        """As `Delivery.deliver`. The mean is copied to gradients that do not lie in the buffer."""
        indices = self._memory.buffer.indices
        if not self.handed_out:
            grads = list(map(_grad_of, self._memory.buffer.params))
            self._elsewhere = self._memory.elsewhere(grads, complete=False)
            del grads
            self._hand_out(untouched)
        elif missing:
            self._hand_out(set(indices).difference(missing).union(untouched))
        if replaced := self._memory.replaced():
            copied = {indices[place] for place in replaced}
            self._private.deliver(missing, set(indices).difference(copied).union(untouched))
        return not untouched or untouched.isdisjoint(indices)

    def discard(self) -> None:
        # A program may have zeroed a gradient before the sum with the peers landed in it.
        with torch.no_grad():
            self._memory.buffer.clear_gradients()

    def _hand_out(self, missing: Set[int]) -> None:
        """Let `.grad` lie in the buffer, except for the missing ones and those that stay where they are."""
        buffer, gradients = self._memory.buffer, self._memory.gradients
        if not missing and not self._elsewhere:
            with suppress(TypeError, RuntimeError):  # of a parameter that was converted since forward
                for param, gradient in zip(buffer.params, gradients, strict=True):
                    param.grad = gradient
                return
        for place, (index, param) in enumerate(zip(buffer.indices, buffer.params, strict=True)):
            if index not in missing and place not in self._elsewhere:
                with suppress(TypeError, RuntimeError):
                    param.grad = gradients[place]

    hand_out_early = _hand_out


class EarlyPrivate(Delivery):
    """As `Private`, but copied on a side stream while backward goes on, if no other code uses the gradients.

    Args:
        private: copies what cannot be copied early.
        buffer: of the bucket.
        side: where to copy early.
    """

    def __init__(self, private: Private, buffer: CommBuffer, side: SideStream) -> None:
        self._private = private
        self._buffer = buffer
        self._side = side
        self._hooks = Hooks(buffer.params)
        self._written: list[Tensor] = []  # gradients, by place
        self._addresses: list[int] = []  # where they were

    def sent(self, work: dist.Work, *, clean: bool) -> None:
        if not clean or capturing() or not self._hooks.are_ours:  # another hook may still read the gradient
            return
        present = [grad for grad in map(_grad_of, self._buffer.params) if grad is not None]
        # The backward that goes on may still read memory that a gradient shares.
        if not are_private(present):
            return
        if self._side.queue(work, partial(self._private.copy_now, present), [self._buffer.table, *present]):
            self._written, self._addresses = present, list(map(Tensor.data_ptr, present))

    def landed(self) -> None:
        self._side.join()

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        done = self.delivered()
        if len(done) == len(self._buffer.params):
            return True
        return self._private.deliver(missing, {*untouched, *(self._buffer.indices[place] for place in done)})

    def discard(self) -> None:
        # A program may have zeroed a gradient before the sum with the peers landed in it.
        written = self._written
        for place in self.delivered():
            written[place].zero_()

    def delivered(self) -> set[int]:
        """Return and forget the places whose gradient is still the one that was written, at the same address."""
        written, self._written = self._written, []
        params = self._buffer.params
        same = bool(written) and all(map(is_, map(_grad_of, params), written))
        if same and list(map(Tensor.data_ptr, written)) == self._addresses:
            return set(range(len(written)))  # as usual, in a few passes in C
        return {
            place
            for place, (grad, address) in enumerate(zip(written, self._addresses, strict=bool(written)))
            if params[place].grad is grad and grad.data_ptr() == address
        }
