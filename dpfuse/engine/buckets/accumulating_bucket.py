"""A bucket that adds gradients up in its buffer while nothing is synchronised. Knows no hook and no order of events."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dpfuse.engine.averaging import Averaging
from dpfuse.engine.buckets.bucket import BucketState, GradBucket
from dpfuse.engine.buckets.ordered_bucket import OrderedBucket
from dpfuse.engine.buckets.ranges import ranged_without_graph
from dpfuse.engine.memory_order import real_pairs
from dpfuse.engine.streams import capturing
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.errors import DPFuseError
from dpfuse_kernels import PointerTable, flatten, unflatten

__all__ = ["AccumulatingBucket", "AccumulatingOrderedBucket", "refuse_accumulated"]


class AccumulatingBucket(GradBucket):
    """Gradients that are added up in the communication buffer: between two averages they need no memory of their own.

    The first of a window overwrites the buffer, as every pack does: what still lies there counts if it is somebody's
    `.grad`, and only then. The others are added to it, scaled alike, in the dtype of the buffer. The launch adds what
    is in `.grad` then, and ends the window. Arguments are those of `GradBucket`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held: set[int] = set()
        _refuse_steps()

    def accumulate(self, *, backward_ended: bool) -> None:
        """Add what is in `.grad` to the buffer, and leave None there.

        Args:
            backward_ended: False puts it off where other hooks still have to read what was accumulated.

        Raises:
            DPFuseError: a CUDA graph is being captured; a gradient is the buffer itself.
            ValueError: a gradient does not fit its parameter; the text names it.
        """
        table = self._table or self._allocate()
        if self.squares is not None:
            self.squares.forget()
        if backward_ended:
            self._sources = []  # all streams are in order by now
        elif sum(map(len, self._hooks)) != len(self._hooks):
            return  # another hook still has to read what was accumulated
        grads = [param.grad for param in self.fused_params]
        if all(grad is None for grad in grads):
            return
        if capturing():
            raise DPFuseError(_captured(self._label))
        self._move(BucketState.FREE, BucketState.FREE)
        several_streams = self._precede()
        with ranged_without_graph("dpfuse::accumulate", self._label):
            packed = [*map(real_pairs, grads)] if self._is_complex else grads
            self._pack([*packed, None] if self.tail is not None else packed, table, None, None)
        self.held.update(i for i, grad in zip(self._fused.params, grads, strict=True) if grad is not None)
        _filled[self] = None
        if several_streams:  # else their memory is used again behind all that has read it
            self._sources = [*self._sources, *grads]
        for param in self.fused_params:
            param.grad = None

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Add the gradients to what is held and start the all-reduce; arguments as for `GradBucket.launch`."""
        super().launch(complete=complete, unused=unused, failed=failed, empty=empty)
        self.forget()

    def forget(self) -> int:
        """Let what is held count no more; returns of how many parameters that was."""
        count = len(self.held)
        self.held.clear()
        _filled.pop(self, None)
        return count

    def hand_back(self) -> None:
        """Put what is held into `.grad`, where it would be without this bucket.

        Raises:
            DPFuseError: a parameter has got another shape.
        """
        if not self.held:
            return
        assert self._table is not None
        self._move(BucketState.FREE, BucketState.FREE)
        dtype, device = getattr(torch, self.plan.dtype), self._table.flat.device
        grads: list[Tensor | None] = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) if index in self.held else None
            for index, (shape, stride) in zip(self._fused.params, self._shapes, strict=True)
        ]
        with torch.no_grad():
            targets = [None if grad is None or not self._is_complex else torch.view_as_real(grad) for grad in grads]
            targets = targets if self._is_complex else [*grads]
            unflatten(
                self._table,
                [*targets, None] if self.tail is not None else targets,
                scale=1.0 / self._averaging.pre_scale,
            )
            for param, name, grad in zip(self.fused_params, self._names, grads, strict=True):
                if grad is None:
                    continue
                if param.shape != grad.shape:
                    raise DPFuseError(
                        f"parameter {name!r} has shape {tuple(param.shape)}, expected {tuple(grad.shape)} as when its "
                        "gradients were accumulated in their bucket. Change it between a synchronised backward and the "
                        "next no_sync(), or call discard_accumulated() before."
                    )
                grad = grad.to(param.device, param.dtype)
                param.grad = grad if param.grad is None else param.grad + grad
        self.forget()

    def average_by(self, averaging: Averaging) -> None:
        """Use other factors from now on, also for what was accumulated before."""
        if averaging.pre_scale != self._averaging.pre_scale:
            self.hand_back()
        super().average_by(averaging)

    def holds_of(self, wanted: Collection[int]) -> str | None:
        """The name of a parameter of which something is held, among those with these ids; None if there is none."""
        for index, param, name in zip(self._fused.params, self.fused_params, self._names, strict=True):
            if index in self.held and id(param) in wanted:
                return name
        return None

    def _pack(
        self, grads: list[Tensor | None], table: PointerTable, counts: Tensor | None, factor: Tensor | None
    ) -> None:
        if not self.held:
            super()._pack(grads, table, counts, factor)
            return
        if capturing():
            raise DPFuseError(_captured(self._label))
        for name, grad, view in zip(self._names, grads, table.views, strict=False):
            if grad is not None and _same_memory(grad, view):
                raise DPFuseError(
                    f"the gradient of parameter {name!r} is a view of the buffer in which its gradients are being "
                    "accumulated, kept from the step before; expected None or a tensor of its own. Leave .grad alone "
                    "until the synchronised backward, or assign a clone before the first backward inside no_sync()."
                )
        if factor is not None:  # which is for all that is averaged; the tail is still to be written
            torch._foreach_mul_(table.views[: len(self._names)], factor)
        scale = self._averaging.pre_scale
        flatten(grads, table, scale=scale, counts=counts, factor=factor, accumulate=True)


class AccumulatingOrderedBucket(AccumulatingBucket, OrderedBucket):
    """The same, reduced in the order of the ranks."""


_filled: WeakKeyDictionary[AccumulatingBucket, None] = WeakKeyDictionary()  # those that hold something


def refuse_accumulated(params: Iterable[Tensor], what: str) -> None:
    """Raises DPFuseError where gradients of `params` are in a bucket and not in `.grad`; `what` needs them there."""
    if not _filled:
        return
    wanted = set(map(id, params))
    for reference in _filled.keyrefs():  # at once: other threads may fill buckets meanwhile
        bucket = reference()
        if bucket is not None and (name := bucket.holds_of(wanted)) is not None:
            raise DPFuseError(
                f"{what} while gradients of parameter {name!r} lie in its bucket, where backwards inside no_sync() "
                "have accumulated them (accumulate_in_buckets=True), and not in .grad; expected a synchronised "
                "backward before. Run the last backward of the window outside of no_sync(), throw the window away "
                "with discard_accumulated(), or leave accumulate_in_buckets out."
            )


_watching_steps = False


def _refuse_steps() -> None:
    """From now on no optimizer steps on parameters whose gradients are in a bucket: it would find nothing to do."""
    global _watching_steps
    if not _watching_steps:
        _watching_steps = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _filled:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        refuse_accumulated(params, f"{type(optimizer).__name__}.step() was called")


leave_untraced(_before_step, calls=True, reason="dpfuse looks here for gradients that are not in .grad")


def _same_memory(grad: Tensor, view: Tensor) -> bool:
    """Whether they begin at the same address; another tensor may be there, as by `detach()`."""
    return grad.layout is torch.strided and grad.numel() > 0 and grad.data_ptr() == view.data_ptr()


def _captured(label: str) -> str:
    return (
        f"{label} has to accumulate gradients while a CUDA graph is captured, where a replay would overwrite what the "
        "one before has left; expected none inside no_sync(). Leave accumulate_in_buckets out, or run no_sync() "
        "outside of graphs."
    )
