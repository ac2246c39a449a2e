"""Large gradients on a CPU, packed one by one as they come. Knows no collective and no order of events."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpfuse.errors import DPFuseError
from dpfuse_kernels import PointerTable, flatten, uses_triton

__all__ = ["LARGE", "EarlyPack"]

LARGE = 128 << 10  # bytes from which a gradient is worth a call of its own: of 64 KB it costs what it saves


class EarlyPack:
    """Packs large gradients as soon as they are ready, and the others of their bucket later, all at once.

    A gradient that was just computed is in the caches of a CPU. If its memory is free again at once, the next one is
    computed there, and so are all: behind a bucket of 25 MB each has memory of its own, which is not in the caches.

    Args:
        places: of the large gradients in their bucket.
    """

    def __init__(self, places: Collection[int]) -> None:
        self.places = places
        self._packed: dict[int, int] = {}  # since the bucket was sent last: what the version of the view was then

    def __bool__(self) -> bool:
        """Whether any was."""
        return bool(self._packed)

    def lay_out(self, table: PointerTable) -> None:
        """Pack there from now on."""
        self._large: dict[int, PointerTable] = {}
        for place in () if uses_triton(table) else self.places:
            slot = table.slots[place]
            # By way of `data`, so that each counts its own versions.
            part = table.flat.data[slot.offset : slot.offset + slot.numel]
            self._large[place] = PointerTable(part, [replace(slot, offset=0)], table.dtype)
        self._views = {place: large.views[0] for place, large in self._large.items()}
        self._small = [place for place in range(len(table.slots)) if place not in self._large]
        self._rest = PointerTable(table.flat, [table.slots[place] for place in self._small], table.dtype)

    def pack(self, place: int, param: Tensor, scale: float) -> bool:
        """Pack the gradient of this parameter, and make it its view; leave what is unusual for `pack_rest`.

        Returns:
            False if that was done before: what was added since was added to something scaled.
        """
        # Every call counts: what is run once per large gradient has left the caches when it is run again.
        grad, view = param.grad, self._views.get(place)
        if place in self._packed:
            self._packed[place] = self._views[place]._version
            return False
        if view is None or type(grad) is not Tensor or torch.is_grad_enabled():
            return True
        if view.data_ptr() != self._large[place].address:  # `grad.data = x` has moved it
            view = self._views[place] = self._large[place].new_views()[0]
        try:
            if grad.data_ptr() == view.data_ptr() or grad.dtype != view.dtype or grad.size() != view.size():
                return True
            if scale == 1.0:  # older torch changes the bits of a NaN that it multiplies with 1
                view.copy_(grad)
            else:
                torch.mul(grad, scale, out=view)
        except RuntimeError:
            return True  # such as a sparse one
        param.grad = view
        self._packed[place] = view._version
        return True

    def pack_rest(self, grads: Sequence[Tensor | None], scale: float) -> None:
        """Pack what is still to be packed of these, one for each slot.

        Raises:
            ValueError: a gradient does not fit.
            DPFuseError: one that was packed has been changed since.
        """
        for place, version in self._packed.items():
            table, view = self._large[place], self._views[place]
            if grads[place] is not view or view._version != version or view.data_ptr() != table.address:
                raise DPFuseError(
                    f"the gradient of parameter {table.slots[0].name!r} was changed in this backward after it had been "
                    "packed, multiplied for the mean; expected nobody to touch it then. Change gradients in a hook on "
                    "their own parameter (register_hook, register_post_accumulate_grad_hook) or after backward, or "
                    "pass gradient_as_bucket_view=False"
                )
        for place, table in self._large.items():
            if place not in self._packed:
                flatten([grads[place]], table, scale=scale, matched=True)
        if self._small:
            flatten([grads[place] for place in self._small], self._rest, scale=scale, matched=True)

    def forget(self) -> list[Tensor]:
        """What was packed since the bucket was sent last is of no interest any more; returns the views."""
        views = [self._views[place] for place in self._packed]
        self._packed.clear()
        return views
