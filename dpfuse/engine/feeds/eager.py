"""Large gradients on a CPU are packed one by one, as soon as they are ready; the others when the bucket is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feeds.at_once import AtOnce
from dpfuse.engine.param_spec import ITEM_SIZE
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Feed, PackArguments
from dpfuse.engine.renewed_memory import RenewedMemory
from dpfuse.engine.torch_private import Hooks, leave_untraced
from dpfuse.errors import DPFuseError
from dpfuse_kernels import PointerTable, flatten
from dpfuse_kernels.backend import uses_triton

__all__ = ["LARGE", "Eager"]

LARGE = 128 << 10  # bytes from which a gradient is worth a call of its own; at 64 KB the call costs as much as it saves


class Eager(Feed):
    """Packs a large gradient as soon as it is ready, while it is in the caches of the CPU, and makes it a view.

    Its memory is free again at once, so the next gradient is computed in the same memory, which is in the caches. If
    a bucket of 25 MB were packed at the end, each gradient would have its own memory, which is no longer there.

    Args:
        bucket: the plan of what lies in the buffer.
        buffer: of the bucket; `.grad` becomes views of it, in the gradients' own real dtype.
        hooks: of its parameters.
        memory: of the communication buffer, if it may get new memory.
    """

    def __init__(self, bucket: Bucket, buffer: CommBuffer, hooks: Hooks, memory: RenewedMemory | None = None) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._hooks = hooks
        self._memory = memory
        self._at_once = AtOnce(buffer)
        self._views: dict[int, Tensor] | list[Tensor] = {}
        self._packed: dict[int, int] = {}  # places packed since the last send -> version of the view then
        self._large: dict[int, PointerTable] = {}
        self.follow_buffer()
        if memory is not None:
            memory.follow(self.follow_buffer)

    def follow_buffer(self) -> None:
        table = self._buffer.table
        for place in () if uses_triton(table) else _large_places(self._bucket):
            slot = table.slots[place]
            # A view of `data`, so that each part has a version counter of its own.
            part = table.flat.data[slot.offset : slot.offset + slot.numel]
            self._large[place] = PointerTable(part, [replace(slot, offset=0)], table.dtype)
        views = {place: large.views[0] for place, large in self._large.items()}
        self._views = views if self._memory is None else self._memory.gradients  # by place
        self._small = [place for place in range(len(table.slots)) if place not in self._large]
        self._rest = PointerTable(table.flat, [table.slots[place] for place in self._small], table.dtype)

    @staticmethod
    def suits(bucket: Bucket, wire: str) -> bool:
        """Whether eager packing pays for gradients that are views of this bucket and travel in the dtype `wire`."""
        if bucket.sparse or torch.device(bucket.device).type != "cpu" or wire != bucket.dtype:
            return False
        return bool(_large_places(bucket))

    def hooks(self) -> dict[int, Callable[[], None]]:
        return {self._buffer.indices[place]: partial(self._pack_now, place) for place in self._large}

    def _pack_now(self, place: int) -> None:
        """Pack the gradient at `place` and make it a view of the buffer; leave unusual gradients to `pack`."""
        # Each call is expensive here: between two large gradients this code leaves the caches.
        if place in self._packed or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        if not self._hooks.is_ours(place):  # another hook, such as that of a second wrapper, still has to read it
            return
        if self._memory is not None and not self._packed:
            self._memory.before_write()
        buffer, view, large = self._buffer, self._views[place], self._large[place]
        param, scale = buffer.params[place], buffer.averaging.pre_scale
        grad, (low, high) = param.grad, buffer.table.storage_range
        if view.data_ptr() != large.address or view.stride() != large.slots[0].stride:  # `grad.data = x`, `grad.t_()`
            if self._memory is not None:
                return
            view = self._views[place] = large.new_views()[0]
        try:
            if type(grad) is not Tensor or grad.dtype != view.dtype or grad.size() != view.size():
                return
            if low <= grad.data_ptr() < high:
                return  # it was added to what is there, or it is the gradient of another parameter
            if self._memory is not None and not self._memory.may_replace(grad):
                return
            if scale == 1.0:  # older torch changes the bits of a NaN that it multiplies with 1
                view.copy_(grad)
            else:
                torch.mul(grad, scale, out=view)
            param.grad = view
        except (TypeError, RuntimeError):  # such as a sparse gradient, or a converted parameter
            return
        increment_version(buffer.flat)  # a graph may have saved the gradient of the last step, which was here
        self._packed[place] = view._version
        if self._memory is not None:
            self._memory.filled(is_filled=True)

    leave_untraced(_pack_now, calls=True, reason="dpfuse packs gradients here")

    def pack(self, grads: list[Tensor | None], arguments: PackArguments) -> None:
        if not self._packed:
            self._at_once.pack(grads, arguments)
            return
        self._check_untouched(grads)
        sources = grads if arguments.report is None else [*grads, arguments.report]
        for place, large in self._large.items():
            if place not in self._packed:
                flatten([sources[place]], large, scale=arguments.scale, matched=True)
                self._refuse_elsewhere(sources[place], large)
        if self._small:
            flatten([sources[place] for place in self._small], self._rest, scale=arguments.scale, matched=True)

    def sent(self) -> None:
        self._packed.clear()
        if self._memory is not None:
            self._memory.filled(is_filled=False)

    def _check_untouched(self, grads: list[Tensor | None]) -> None:
        for place, version in self._packed.items():
            view = self._views[place]
            if grads[place] is not view or view._version != version or view.data_ptr() != self._large[place].address:
                raise DPFuseError(
                    f"the gradient of parameter {self._buffer.names[place]!r} was changed in this backward after it "
                    "had been packed, multiplied for the mean: the parameter became ready again, or other code wrote "
                    "or replaced it; expected neither. Use the parameter as often in every step as in the first "
                    "synchronised one, and change gradients in a hook on their own parameter (register_hook, "
                    "register_post_accumulate_grad_hook) or after backward"
                )

    def _refuse_elsewhere(self, grad: Tensor | None, large: PointerTable) -> None:
        """Raise ValueError for a gradient in the slot of another parameter. Packing may have overwritten either."""
        low, high = self._buffer.table.storage_range
        if grad is not None and low <= grad.data_ptr() < high and grad.data_ptr() != large.address:
            raise ValueError(
                f"the gradient of parameter {large.slots[0].name!r} lies in another parameter's part of the "
                "communication buffer; expected its own part, or memory of its own. Assign a clone"
            )


def _large_places(bucket: Bucket) -> list[int]:
    item = ITEM_SIZE[bucket.dtype]
    return [place for place, slot in enumerate(bucket.slots) if slot.numel * item >= LARGE]
