"""A bucket whose large gradients are reduced where they lie, beside the buffer of the small ones. Knows no order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine import collective
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.buckets.bucket import GradBucket
from dpfuse.engine.memory_order import dense_stride
from dpfuse.engine.ownership import is_private
from dpfuse.engine.plan import Bucket, Slot
from dpfuse.engine.report import Tail
from dpfuse.gradients.finite import FiniteCounter
from dpfuse_kernels import PointerTable, flatten, unflatten
from dpfuse_kernels import Slot as KernelSlot

__all__ = ["InPlaceBucket"]

# Bytes from which a gradient is. Each is a collective of its own on gloo: of ten gradients of 1 MB that costs what the
# copies cost (step 0.99 of that with copies), of 2 MB less (0.81), of 256 KB more (1.5): docs/design/0006-in-place.md.
LARGE = 2 << 20


class InPlaceBucket(GradBucket):
    """Private gradients of which the large ones are not copied: each is a part of the all-reduce where it lies.

    The small ones and the tail travel in the flat buffer, as in every bucket, in the same group of collectives.
    What is in a large gradient between `launch` and `wait` is nobody's business, and it is lost where `discard`
    follows. One that others may see or write meanwhile travels in a copy instead, which no other rank notices.

    Arguments are those of `GradBucket`; `views` is False, and gradients travel in their own real dtype.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        names: Sequence[str],
        group: dist.ProcessGroup,
        *,
        averaging: Averaging,
        views: bool = False,
        tail: Tail | None = None,
        label: str = "",
    ) -> None:
        assert not views
        assert averaging == Averaging(bucket.dtype, averaging.pre_scale)
        small = [place for place, slot in enumerate(bucket.slots) if not _is_large(slot, bucket.dtype)]
        super().__init__(
            # The number of bytes is for labels, and stays that of all.
            replace(
                bucket,
                params=tuple(bucket.params[place] for place in small),
                slots=tuple(bucket.slots[place] for place in small),
            ),
            [params[place] for place in small],
            [names[place] for place in small],
            group,
            averaging=averaging,
            views=False,
            tail=tail,
            label=label,
        )
        self.plan, self.params = bucket, list(params)
        rest = sorted({*range(len(params))}.difference(small))
        self._large = [_LargeGradient(params[place], bucket, place, names[place]) for place in rest]
        self._refused: Exception | None = None

    @staticmethod
    def suits(bucket: Bucket, averaging: Averaging) -> bool:
        """Whether private gradients of this bucket are worth it, and can be reduced in place."""
        if bucket.sparse or averaging.dtype != bucket.dtype:
            return False
        return any(_is_large(slot, bucket.dtype) for slot in bucket.slots)

    def launch(
        self, *, complete: bool = False, unused: Collection[int] = (), failed: bool = False, empty: bool = False
    ) -> None:
        """Pack the small gradients and start the all-reduce of all; arguments as for `GradBucket.launch`."""
        self._precede()
        self._refused = None
        try:
            # Nothing is written yet: what lies in memory of others is read before anything is reduced.
            with torch.no_grad():
                for one in self._large:
                    one.take(empty=empty)
                if self.factors is not None and not empty:
                    self.factors.apply([one.flat for one in self._large if not one.missing])
        except (ValueError, TypeError, RuntimeError) as error:
            self._refused = error
        missing = [one.index for one in self._large if one.missing and not empty]
        failed = failed or self._refused is not None
        super().launch(complete=complete, unused=[*unused, *missing], failed=failed, empty=empty)
        self.missing += missing

    def deliver(self, untouched: Collection[int] = ()) -> None:
        """Hand over what was not reduced where it is to be; arguments as for `GradBucket.deliver`."""
        super().deliver(untouched)
        with torch.no_grad():
            for one in self._large:
                if one.index not in untouched:
                    one.deliver()
                one.forget()

    def discard(self) -> None:
        """Wait if need be, and give the buffer back; large gradients that were complete are lost, and become zeros."""
        super().discard()
        for one in self._large:
            one.lose()
            one.forget()

    @property
    def bytes_in_place(self) -> int:
        """Of the gradients that the last launch reduced where they lie, without a copy."""
        return sum(one.nbytes for one in self._large if one.in_place)

    def _settle_counts(self, finite: FiniteCounter) -> None:
        for one in self._large:
            if self._refused is None and not one.missing:
                finite.count(one.name, one.flat)
        super()._settle_counts(finite)

    def _start(self, flat: Tensor) -> dist.Work:
        self.error = self.error or self._refused
        if self.error is not None:
            for one in self._large:
                one.clear()
        tensors = self._travelling(flat)
        count = len(self._large)
        return collective.all_reduce_together(tensors[count:], tensors[:count], self._averaging.pre_scale, self._group)

    def _travelling(self, flat: Tensor) -> list[Tensor]:
        return [*(one.flat for one in self._large), *([flat] if flat.numel() else ())]


class _LargeGradient:
    """One gradient that is reduced where it lies, or in a copy.

    Args:
        param: whose gradient it is.
        bucket: the plan of its bucket.
        place: of the parameter there.
        name: for errors.

    Attributes:
        index: registration index of the parameter.
        name: its name.
        missing: whether there was no gradient when it was taken.
        in_place: whether it is itself what travels, or was in the last launch.
        flat: what travels, [elements], in the planned memory order; only until it is delivered.
        nbytes: its bytes.
    """

    flat: Tensor

    def __init__(self, param: Tensor, bucket: Bucket, place: int, name: str) -> None:
        self.index = bucket.params[place]
        self.name = name
        self.missing = False
        self._param = param
        self._dtype = getattr(torch, bucket.dtype)
        self._device = torch.device(bucket.device)
        self._slot = KernelSlot(name, 0, tuple(param.shape), dense_stride(param))
        self.nbytes = self._slot.numel * self._dtype.itemsize
        self.in_place = False
        self._copy: PointerTable | None = None
        self._taken: Tensor | None = None  # the gradient; referenced until all that reads it is ordered

    def take(self, *, empty: bool) -> None:
        """Make `flat` the gradient, or a copy of it, or zeros where there is none; writes no gradient."""
        self._taken = grad = None if empty else self._param.grad
        self.missing = grad is None
        self.in_place = grad is not None and self._may_be_written(grad)
        if self.in_place:
            assert grad is not None
            # Seen flat: to a process group the order of dimensions means nothing. And `grad.data = x` moves `grad`.
            self.flat = grad.as_strided((self._slot.numel,), (1,))
        else:
            table = self._table_for_copy()
            flatten([grad], table, matched=True)
            self.flat = table.flat

    def clear(self) -> None:
        """Send zeros in its place."""
        self.in_place = False
        self.flat = self._table_for_copy().flat.zero_()

    def deliver(self) -> None:
        """Make the reduced gradient the parameter's."""
        grad = self._param.grad
        if self.in_place:
            if grad is not None and grad is self._taken and grad.data_ptr() == self.flat.data_ptr():
                return
            # It was replaced after it was sent, or taken away.
            table = PointerTable(self.flat, [self._slot], self._dtype)
        else:
            table = self._table_for_copy()
        if grad is not None:
            try:
                unflatten(table, [grad], matched=True)
                return
            except (ValueError, RuntimeError):
                pass  # it can be read but not written, such as an expanded one that was set by hand
        self._param.grad = table.views[0].detach()  # a view would keep a second owner of its memory
        self._copy = None  # it is the parameter's now

    def lose(self) -> None:
        """Zero what was reduced in place: its owner may have zeroed it already, before the peers' part landed in it."""
        if self.in_place:
            self.flat.zero_()

    def forget(self) -> None:
        """Let go of what was taken."""
        self._taken = None
        del self.flat

    def _table_for_copy(self) -> PointerTable:
        if self._copy is None:
            flat = torch.zeros(self._slot.numel, dtype=self._dtype, device=self._device)
            self._copy = PointerTable(flat, [self._slot], self._dtype)
        return self._copy

    def _may_be_written(self, grad: Tensor) -> bool:
        """Whether `grad` lies as planned, and nobody but the parameter has it."""
        slot, param = self._slot, self._param
        return (
            type(grad) is Tensor
            and grad.layout is torch.strided
            and grad.dtype == self._dtype
            and grad.device == self._device
            and grad.shape == slot.shape
            and grad.stride() == slot.stride
            and not grad.is_neg()
            and not grad.is_inference()
            # Another hook, say of a second wrapper, still has to read what was accumulated.
            and len(param._post_accumulate_grad_hooks or ()) <= 1
            and grad.untyped_storage().resizable()  # else the memory may be that of numpy
            and is_private(grad)
        )


def _is_large(slot: Slot, dtype: str) -> bool:
    item: torch.dtype = getattr(torch, dtype)
    return slot.numel * item.itemsize >= LARGE
