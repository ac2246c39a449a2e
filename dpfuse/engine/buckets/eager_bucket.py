"""A bucket on a CPU that packs each large gradient as soon as it is ready. Knows no hook and no order of events."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dpfuse.engine.averaging import Averaging
from dpfuse.engine.buckets.bucket import GradBucket
from dpfuse.engine.buckets.bucket_state import FREE
from dpfuse.engine.buckets.ordered_bucket import OrderedBucket
from dpfuse.engine.plan import Bucket
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.errors import DPFuseError
from dpfuse_kernels import PointerTable, flatten
from dpfuse_kernels.backend import uses_triton

__all__ = ["LARGE", "EagerBucket", "EagerOrderedBucket"]

LARGE = 128 << 10  # bytes from which a gradient is worth a call of its own: of 64 KB it costs what it saves


class EagerBucket(GradBucket):
    """Gradients of which the large ones become their views one by one, and the others when the bucket is sent.

    A gradient that was just computed is in the caches of a CPU. If its memory is free again at once, the next one is
    computed there, and so are all: behind a bucket of 25 MB each has memory of its own, which is not in the caches.

    Arguments are those of `GradBucket`; `views` is True, and gradients travel in their own real dtype.
    """

    def __init__(self, bucket: Bucket, *args: Any, **options: Any) -> None:
        super().__init__(bucket, *args, **options)
        self._eager_places = [place for place in range(len(bucket.slots)) if _is_large(bucket, place)]
        self._packed: dict[int, int] = {}  # places, since the bucket was sent last, and versions of their views then

    @staticmethod
    def suits(bucket: Bucket, averaging: Averaging) -> bool:
        """Whether that pays for gradients that are views of this bucket."""
        if bucket.sparse or torch.device(bucket.device).type != "cpu" or averaging.dtype != bucket.dtype:
            return False
        return any(_is_large(bucket, place) for place in range(len(bucket.slots)))

    def eager(self) -> dict[int, Callable[[], None]]:
        """As that of `GradBucket`."""
        return {self._fused.params[place]: partial(self._pack_now, place) for place in self._eager_places}

    def _pack_now(self, place: int) -> None:
        """Pack the gradient there, which is ready, and make it its view; what is unusual is left for the launch."""
        # Every call counts: what is run once for each large gradient has left the caches when it is run again.
        if self.state is not FREE or self.finite is not None or self.factors is not None or place in self._packed:
            return
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        table = self._table or self._allocate()
        view, param = self._large_views.get(place), self.fused_params[place]
        if view is None or len(self._hooks[place]) != 1:  # another one, say of a second wrapper, has still to read it
            return
        grad, scale, (low, high) = param.grad, self._averaging.pre_scale, table.storage_range
        if view.data_ptr() != self._large[place].address:  # `grad.data = x` has moved it
            view = self._large_views[place] = self._large[place].new_views()[0]
        try:
            if type(grad) is not Tensor or grad.dtype != view.dtype or grad.size() != view.size():
                return
            if low <= grad.data_ptr() < high:
                return  # it was added to what is there; or somebody has made it that of another parameter
            if scale == 1.0:  # older torch changes the bits of a NaN that it multiplies with 1
                view.copy_(grad)
            else:
                torch.mul(grad, scale, out=view)
            param.grad = view
        except (TypeError, RuntimeError):  # such as a sparse one, or a parameter that was converted
            return
        increment_version(table.flat)  # a graph may have saved a gradient of the step before, which lay there
        self._packed[place] = view._version

    leave_untraced(_pack_now, calls=True, reason="dpfuse packs gradients here")

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """As that of `GradBucket`."""
        super().deliver(untouched)
        self._packed.clear()

    def discard(self) -> None:
        """As that of `GradBucket`: views that were handed out become zeros."""
        super().discard()
        if not self._handed_out:
            with torch.no_grad():
                for place in self._packed:
                    self._large[place].flat.zero_()  # not the view, which may have been moved
        self._packed.clear()

    def _pack(
        self, grads: list[Tensor | None], table: PointerTable, counts: Tensor | None, factor: Tensor | None
    ) -> None:
        if not self._packed:
            super()._pack(grads, table, counts, factor)
            return
        self._check_untouched(grads)
        scale = self._averaging.pre_scale
        for place, large in self._large.items():
            if place not in self._packed:
                flatten([grads[place]], large, scale=scale, matched=True)
                self._refuse_elsewhere(grads[place], large, table)
        if self._small:
            flatten([grads[place] for place in self._small], self._rest, scale=scale, matched=True)

    def _check_untouched(self, grads: list[Tensor | None]) -> None:
        for place, version in self._packed.items():
            view = self._large_views[place]
            if grads[place] is not view or view._version != version or view.data_ptr() != self._large[place].address:
                raise DPFuseError(
                    f"the gradient of parameter {self._names[place]!r} was changed in this backward after it had been "
                    "packed, multiplied for the mean: the parameter became ready again, or somebody wrote or replaced "
                    "it; expected neither. Use the parameter as often in every step as in the first synchronised one, "
                    "and change gradients in a hook on their own parameter (register_hook, "
                    "register_post_accumulate_grad_hook) or after backward; or pass gradient_as_bucket_view=False"
                )

    def _refuse_elsewhere(self, grad: Tensor | None, large: PointerTable, table: PointerTable) -> None:
        """Raise ValueError for one in the place of another, which may have been packed over it, or it over that."""
        low, high = table.storage_range
        if grad is not None and low <= grad.data_ptr() < high and grad.data_ptr() != large.address:
            raise ValueError(
                f"the gradient of parameter {large.slots[0].name!r} lies in the buffer in the place of another one; "
                "expected its own place, or memory of its own. Assign a clone"
            )

    def _launch_empty(self, failed: bool) -> None:
        self._packed.clear()
        super()._launch_empty(failed)

    def _allocate(self) -> PointerTable:
        table = super()._allocate()
        self._large: dict[int, PointerTable] = {}
        for place in () if uses_triton(table) else self._eager_places:
            slot = table.slots[place]
            # By way of `data`, so that each counts its own versions.
            part = table.flat.data[slot.offset : slot.offset + slot.numel]
            self._large[place] = PointerTable(part, [replace(slot, offset=0)], table.dtype)
        self._large_views = {place: large.views[0] for place, large in self._large.items()}
        self._small = [place for place in range(len(table.slots)) if place not in self._large]
        self._rest = PointerTable(table.flat, [table.slots[place] for place in self._small], table.dtype)
        return table


class EagerOrderedBucket(EagerBucket, OrderedBucket):
    """The same, reduced in the order of the ranks."""


def _is_large(bucket: Bucket, place: int) -> bool:
    item: torch.dtype = getattr(torch, bucket.dtype)
    return bucket.slots[place].numel * item.itemsize >= LARGE
