"""Large private gradients are reduced in their own memory, and the small ones in the communication buffer."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.abilities import abilities_of
from dpfuse.engine.comm_buffer import dense_stride
from dpfuse.engine.param_spec import ITEM_SIZE
from dpfuse.engine.plan import Bucket, Slot
from dpfuse.engine.protocols import Exchange, PackStep
from dpfuse.engine.torch_private import Hooks, are_private, is_private, no_graph
from dpfuse_kernels import PointerTable, flatten, unflatten
from dpfuse_kernels import Slot as KernelSlot
from dpfuse_kernels.seen import Seen

__all__ = ["LARGE", "InPlace", "suits_in_place"]

# Bytes from which a gradient is large. On gloo each is a collective of its own. Compared with copies, a step with ten
# gradients of 1 MB takes 0.99 of the time, of 2 MB 0.81, of 256 KB 1.5: docs/design/0006-in-place.md.
LARGE = 2 << 20


def suits_in_place(bucket: Bucket, wire: str) -> bool:
    """Whether private gradients of this bucket can be reduced in place, and some are large enough."""
    return not bucket.sparse and wire == bucket.dtype and any(_is_large(slot, bucket.dtype) for slot in bucket.slots)


class InPlace(Exchange):
    """All-reduces large gradients in their own memory, together with the buffer of the small ones.

    Between `start` and the end of the wait the content of a large gradient is undefined, and `discard` loses it. A
    gradient that other code may read or write meanwhile is copied first. The other ranks need not know that.

    Args:
        group: the ranks.
        bucket: the plan of all gradients.
        params: the parameters, in the order of `bucket.params`.
        names: of the parameters, for errors.
    """

    def __init__(
        self, group: dist.ProcessGroup, bucket: Bucket, params: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        super().__init__(group)
        places = [place for place, slot in enumerate(bucket.slots) if _is_large(slot, bucket.dtype)]
        self._large = [_LargeGradient(params[place], bucket, place, names[place]) for place in places]
        self._scale = 1.0
        self._seen = Seen()  # what the large gradients were like when all of them had the planned layout
        self._hooks = Hooks([one.param for one in self._large if one.param is not None])
        dtype, device = getattr(torch, bucket.dtype), torch.device(bucket.device)
        self._can_multiply = collective.multiplies(dtype, device, group) and group.size() > 1
        self._coalesces = abilities_of(group, device).coalesces

    @staticmethod
    def small_part(
        bucket: Bucket, params: Sequence[Tensor], names: Sequence[str]
    ) -> tuple[Bucket, list[Tensor], list[str]]:
        """Return plan, parameters and names of the gradients that travel in the buffer."""
        places = [place for place, slot in enumerate(bucket.slots) if not _is_large(slot, bucket.dtype)]
        rest = replace(
            bucket,
            params=tuple(bucket.params[place] for place in places),
            slots=tuple(bucket.slots[place] for place in places),
        )
        return rest, [params[place] for place in places], [names[place] for place in places]

    def multiply_buffer(self) -> None:
        """Multiply the buffer, too, if the group can: then large and small gradients are one call of the group.

        The buffer must have nothing but gradients, and no step may use what is packed there.
        """
        self.multiplies_buffer = self._can_multiply

    def bind(self, params: Sequence[Tensor]) -> set[int]:
        for one in self._large:
            one.param = params[one.place] if params else None
        self._hooks = Hooks([one.param for one in self._large if one.param is not None])
        return {one.place for one in self._large}

    def take(self, scale: float, steps: Sequence[PackStep], frozen: Set[int]) -> list[int]:
        """As `Exchange.take`. No gradient is written before all were read."""
        self._scale = scale
        with no_graph():
            grads = [None if one.index in frozen or one.param is None else one.param.grad for one in self._large]
            usual = self._seen.like(grads)  # type: ignore[arg-type]  # False for None
            alone = usual and self._are_alone(grads)  # type: ignore[arg-type]
            self.bytes_in_place = 0
            for one, grad in zip(self._large, grads, strict=True):
                if one.take(grad, usual=usual, alone=alone):
                    self.bytes_in_place += one.nbytes
            if not usual and all(one.in_place for one in self._large):
                self._seen.remember(grads)  # type: ignore[arg-type]
            for step in steps:
                present = [one for one in self._large if not one.missing]
                step.outside([one.name for one in present], [one.flat for one in present])
        return [one.index for one in self._large if one.missing]

    def _are_alone(self, grads: Sequence[Tensor]) -> bool:
        """Whether `_LargeGradient._is_alone` holds for all gradients, in a few passes in C."""
        if not self._hooks.are_ours:
            return False
        storages = list(map(Tensor.untyped_storage, grads))
        return all(map(torch.UntypedStorage.resizable, storages)) and are_private(grads, storages)

    def empty(self) -> None:
        self.bytes_in_place = 0
        for one in self._large:
            one.clear()

    def start(self, flat: Tensor) -> dist.Work:
        large, small = [one.flat for one in self._large], [flat] if flat.numel() else []
        if self.multiplies_buffer:
            large, small = large + small, []
            if self._coalesces:
                return collective.all_reduce_coalesced(large, self._scale, self.group)
        return collective.all_reduce_together(small, large, self._scale, self.group)

    def tensors(self, flat: Tensor) -> list[Tensor]:
        return [*(one.flat for one in self._large), *([flat] if flat.numel() else ())]

    def deliver(self, untouched: Set[int]) -> None:
        with no_graph():
            for one in self._large:
                if one.index not in untouched:
                    one.deliver()
                one.forget()

    def discard(self) -> None:
        """As `Exchange.discard`. Large gradients are lost, and become zeros."""
        for one in self._large:
            one.lose()
            one.forget()


class _LargeGradient:
    """One gradient that is reduced in its own memory, or in a copy.

    Args:
        param: the parameter of the gradient.
        bucket: the plan of its bucket.
        place: the place of the parameter in the bucket.
        name: its name, for errors.

    Attributes:
        index: registration index of the parameter.
        place: of the parameter in its bucket.
        param: the parameter, if the bucket is bound to any.
        missing: whether there was no gradient when it was taken.
        in_place: whether the gradient itself travels, not a copy.
        nbytes: the bytes of the gradient.
        flat: the tensor that travels, [elements], in the planned memory order, until it is delivered.
    """

    def __init__(self, param: Tensor, bucket: Bucket, place: int, name: str) -> None:
        self.index = bucket.params[place]
        self.missing = False
        self.place = place
        self.param: Tensor | None = param
        self._dtype = getattr(torch, bucket.dtype)
        self._device = torch.device(bucket.device)
        self._slot = KernelSlot(name, 0, tuple(param.shape), dense_stride(param))
        self._numel = self._slot.numel
        self.nbytes = self._numel * int(self._dtype.itemsize)
        self.in_place = False
        self._nothing = torch.empty(0, dtype=self._dtype, device="cpu")
        self.flat = self._nothing
        self._copy: PointerTable | None = None
        self._taken: Tensor | None = None  # the gradient, kept until all kernels that read it are queued

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self._slot.name

    def take(self, grad: Tensor | None, *, usual: bool, alone: bool) -> bool:
        """Make `flat` the gradient, or a copy, or zeros where there is none or it is frozen; write no gradient.

        Args:
            grad: of the parameter; None if it has none, or is frozen.
            usual: whether it is known to have the planned layout.
            alone: whether it is known that only the parameter refers to it.

        Returns:
            `in_place`.
        """
        self._taken = grad
        self.missing = grad is None
        self.in_place = grad is not None and (
            alone or ((usual or self._has_planned_layout(grad)) and self._is_alone(grad))
        )
        if self.in_place:
            assert grad is not None
            # A flat view: the order of dimensions does not matter for a sum, and `grad.data = x` would move `grad`.
            self.flat = grad.as_strided((self._numel,), (1,))
        else:
            table = self._table_for_copy()
            flatten([grad], table, matched=True)
            self.flat = table.flat
        return self.in_place

    def clear(self) -> None:
        """Send zeros instead of the gradient."""
        try:
            self.flat = self._table_for_copy().flat.zero_()
        except Exception:  # there is no memory for a copy; the gradient is lost anyway
            if not self.in_place:
                raise
            self.flat.zero_()
        self._taken, self.in_place = None, False

    def deliver(self) -> None:
        """Give the reduced gradient to the parameter, unless that was done before."""
        if self.flat is self._nothing:
            return
        assert self.param is not None
        grad = self.param.grad
        if self.in_place:
            if grad is not None and grad is self._taken and grad.data_ptr() == self.flat.data_ptr():
                return
            # It was replaced or removed after it was sent.
            table = PointerTable(self.flat, [self._slot], self._dtype)
        else:
            # The copy belongs to the parameter if it was delivered before, and something failed behind it.
            table = self._copy if self._copy is not None else PointerTable(self.flat, [self._slot], self._dtype)
        if grad is not None:
            try:
                unflatten(table, [grad], matched=True)
                return
            except (ValueError, RuntimeError):
                pass  # it can be read but not written, such as an expanded one that a program has assigned
        self.param.grad = table.views[0].detach()  # a view would keep a second owner of its memory
        self._copy = None  # it belongs to the parameter now

    def lose(self) -> None:
        """Zero what was reduced in place. A program may have zeroed it before the sum with the peers landed in it."""
        if self.in_place:
            self.flat.zero_()

    def forget(self) -> None:
        """Drop the references to what was taken."""
        self._taken, self.flat = None, self._nothing

    def _table_for_copy(self) -> PointerTable:
        if self._copy is None:
            flat = torch.zeros(self._numel, dtype=self._dtype, device=self._device)
            self._copy = PointerTable(flat, [self._slot], self._dtype)
        return self._copy

    def _has_planned_layout(self, grad: Tensor) -> bool:
        slot = self._slot
        return (
            type(grad) is Tensor
            and grad.layout is torch.strided
            and grad.dtype == self._dtype
            and grad.device == self._device
            and grad.shape == slot.shape
            and grad.stride() == slot.stride
            and not grad.is_neg()
            and not grad.is_inference()
        )

    def _is_alone(self, grad: Tensor) -> bool:
        """Whether only the parameter refers to `grad`, so that its memory may be written."""
        assert self.param is not None
        hooks, storage = self.param._post_accumulate_grad_hooks, grad.untyped_storage()
        return (
            # Another hook, such as that of a second wrapper, still has to read the gradient.
            (hooks is None or len(hooks) <= 1)
            and storage.resizable()  # else the memory may be that of numpy
            and is_private(grad, storage)
        )


def _is_large(slot: Slot, dtype: str) -> bool:
    return slot.numel * ITEM_SIZE[dtype] >= LARGE
