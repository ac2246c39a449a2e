"""Large private gradients are reduced in their own memory, small ones beside them or in the communication buffer."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from operator import attrgetter, is_

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.abilities import abilities_of
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.comm_buffer import dense_stride
from dpfuse.engine.param_spec import ITEM_SIZE
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Exchange, PackStep
from dpfuse.engine.torch_private import Hooks, are_private, is_private, no_graph
from dpfuse_kernels import PointerTable, flatten, unflatten
from dpfuse_kernels import Slot as KernelSlot
from dpfuse_kernels.known_tensors import Seen

__all__ = ["FEW", "LARGE", "InPlace", "places_in_place"]

# Bytes from which a gradient is large. On gloo each is a collective of its own. Compared with copies, a step with ten
# gradients of 1 MB took 0.99 of the time, of 2 MB 0.81, of 256 KB 1.5, in a script that was not recorded.
# docs/design/decisions.md#0006-in-place has the reason and a record.
LARGE = 2 << 20
# Gradients of a bucket up to which the small ones, too, stay where they are, if one call of the group starts all. Each
# costs the host a microsecond or two, and a copy into the buffer and back two kernels and some thirty microseconds.
FEW = 16

_grad_of, _address_of = attrgetter("grad"), Tensor.data_ptr


def places_in_place(bucket: Bucket, averaging: Averaging, group: dist.ProcessGroup, *, packs: bool) -> list[int]:
    """Return the places of the private gradients of this bucket that are reduced in place: none if none is large.

    Args:
        bucket: the plan of all gradients.
        averaging: the factor, and the dtype that travels.
        group: the ranks.
        packs: whether the buffer of the bucket is needed in any case.
    """
    if bucket.sparse or averaging.dtype != bucket.dtype:
        return []
    large = [place for place, slot in enumerate(bucket.slots) if slot.numel * ITEM_SIZE[bucket.dtype] >= LARGE]
    if not large or packs or len(bucket.slots) > FEW:
        return large
    dtype, device = getattr(torch, bucket.dtype), torch.device(bucket.device)
    # Else each of them would be multiplied by a kernel of its own.
    at_once = collective.is_exact(averaging.pre_scale, dtype) or collective.multiplies(dtype, device, group)
    return list(range(len(bucket.slots))) if at_once and abilities_of(group, device).coalesces else large


class InPlace(Exchange):
    """All-reduces gradients in their own memory, together with the buffer of the others.

    Between `start` and the end of the wait the content of such a gradient is undefined, and `discard` loses it. A
    gradient that other code may read or write meanwhile is copied first. The other ranks need not know that.

    Args:
        group: the ranks.
        bucket: the plan of all gradients.
        params: the parameters, in the order of `bucket.params`.
        names: of the parameters, for errors.
        places: what `places_in_place` returned.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        bucket: Bucket,
        params: Sequence[Tensor],
        names: Sequence[str],
        places: Sequence[int],
    ) -> None:
        super().__init__(group)
        self._each = [_GradientInPlace(params[place], bucket, place, names[place]) for place in places]
        self._params: list[Tensor] = []  # those of `_each`; none if the bucket is bound to none
        self._is_flat = all(one.is_contiguous for one in self._each)
        self._scale = 1.0
        self._seen = Seen()  # what the gradients were like when all of them had the planned layout
        self._flats: list[Tensor] = []  # what travels
        self._taken: list[Tensor] = []  # the gradients, if all are in place; else each of `_each` knows its own
        self._all_in_place = False  # whether each of `_each` has noted that it was, when all were taken last
        self._hooks = Hooks([])
        self.bind(params)
        dtype, device = getattr(torch, bucket.dtype), torch.device(bucket.device)
        self._can_multiply = collective.multiplies(dtype, device, group) and group.size() > 1
        self._coalesces = abilities_of(group, device).coalesces

    @staticmethod
    def others(
        bucket: Bucket, params: Sequence[Tensor], names: Sequence[str], places: Sequence[int]
    ) -> tuple[Bucket, list[Tensor], list[str]]:
        """Return plan, parameters and names of the gradients that travel in the buffer: all but those at `places`."""
        rest = [place for place in range(len(bucket.slots)) if place not in places]
        plan = replace(
            bucket,
            params=tuple(bucket.params[place] for place in rest),
            slots=tuple(bucket.slots[place] for place in rest),
        )
        return plan, [params[place] for place in rest], [names[place] for place in rest]

    def multiply_buffer(self) -> None:
        """Multiply the buffer, too, if the group can: then all gradients are one call of the group.

        The buffer must have nothing but gradients, none may be packed early, and no step may use what is packed there.
        """
        self.multiplies_buffer = self._can_multiply

    def bind(self, params: Sequence[Tensor]) -> set[int]:
        for one in self._each:
            one.param = params[one.place] if params else None
        self._params = [params[one.place] for one in self._each] if params else []
        self._hooks = Hooks(self._params)
        return {one.place for one in self._each}

    def take(self, scale: float, steps: Sequence[PackStep], frozen: Set[int]) -> list[int]:
        """As `Exchange.take`. No gradient is written before all were read."""
        self._scale = scale
        with no_graph():
            grads: list[Tensor | None] = list(map(_grad_of, self._params)) or [None] * len(self._each)
            if frozen:
                grads = [None if one.index in frozen else grad for one, grad in zip(self._each, grads, strict=True)]
            usual = self._seen.like(grads)  # type: ignore[arg-type]  # False for None
            if usual and self._is_flat and self._are_alone(grads):  # type: ignore[arg-type]
                self._take_all(grads)  # type: ignore[arg-type]
            else:
                self._take_each(grads, usual=usual)
            for step in steps:
                present = [
                    (one.name, flat) for one, flat in zip(self._each, self._flats, strict=True) if not one.missing
                ]
                step.outside([name for name, _ in present], [flat for _, flat in present])
        return [] if self._taken else [one.index for one in self._each if one.missing]

    def _take_all(self, grads: list[Tensor]) -> None:
        """Take all gradients, which are contiguous and which only the parameters refer to, in a few passes in C."""
        if not self._all_in_place:  # in the backward before
            for one in self._each:
                one.in_place, one.missing = True, False
            self._all_in_place, self.bytes_in_place = True, sum(one.nbytes for one in self._each)
        # Not the gradients themselves: `grad.data = x` would move them.
        self._taken, self._flats = grads, list(map(Tensor.detach, grads))

    def _take_each(self, grads: Sequence[Tensor | None], *, usual: bool) -> None:
        self._taken, self._all_in_place, self.bytes_in_place = [], False, 0
        for one, grad in zip(self._each, grads, strict=True):
            if one.take(grad, usual=usual):
                self.bytes_in_place += one.nbytes
        self._flats = [one.flat for one in self._each]
        if not usual and all(one.in_place for one in self._each):
            self._seen.remember(grads)  # type: ignore[arg-type]

    def _are_alone(self, grads: Sequence[Tensor]) -> bool:
        """Whether `_GradientInPlace._is_alone` holds for all gradients, in a few passes in C."""
        if not self._hooks.are_ours:
            return False
        storages = list(map(Tensor.untyped_storage, grads))
        return all(map(torch.UntypedStorage.resizable, storages)) and are_private(grads, storages)

    def empty(self, scale: float) -> None:
        self._scale = scale
        self._tell_each()
        self._all_in_place, self.bytes_in_place = False, 0
        for one in self._each:
            one.clear()
        self._flats = [one.flat for one in self._each]

    def start(self, flat: Tensor) -> dist.Work:
        tensors = self.tensors(flat)
        if not self.multiplies_buffer:
            return collective.all_reduce_together(tensors[len(self._each) :], self._flats, self._scale, self.group)
        if self._coalesces:
            return collective.all_reduce_coalesced(tensors, self._scale, self.group)
        return collective.all_reduce_together([], tensors, self._scale, self.group)

    def tensors(self, flat: Tensor) -> list[Tensor]:
        return [*self._flats, flat] if flat.numel() else self._flats

    def deliver(self, untouched: Set[int]) -> None:
        if self._taken and self._still_there():
            self._taken, self._flats = [], []
            return
        self._tell_each()
        with no_graph():
            for one in self._each:
                if one.index not in untouched:
                    one.deliver()
                one.forget()
        self._flats = []

    def discard(self) -> None:
        """As `Exchange.discard`. Gradients that were reduced in place are lost, and become zeros."""
        self._tell_each()
        for one in self._each:
            one.lose()
            one.forget()
        self._flats = []

    def _still_there(self) -> bool:
        """Whether no program has replaced, removed or moved a gradient since all were sent."""
        if not all(map(is_, map(_grad_of, self._params), self._taken)):
            return False
        return list(map(_address_of, self._taken)) == list(map(_address_of, self._flats))

    def _tell_each(self) -> None:
        """Let each gradient know its own, since not all of them are usual any more."""
        if self._taken:
            for one, grad, flat in zip(self._each, self._taken, self._flats, strict=True):
                one.hold(grad, flat)
            self._taken = []


class _GradientInPlace:
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
        is_contiguous: whether that is its planned layout.
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
        self.is_contiguous = self._slot.stride == torch.empty(param.shape, device="meta").stride()
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

    def take(self, grad: Tensor | None, *, usual: bool) -> bool:
        """Make `flat` the gradient, or a copy, or zeros where there is none or it is frozen; write no gradient.

        Args:
            grad: of the parameter; None if it has none, or is frozen.
            usual: whether it is known to have the planned layout.

        Returns:
            `in_place`.
        """
        self.missing = grad is None
        self.in_place = grad is not None and (usual or self._has_planned_layout(grad)) and self._is_alone(grad)
        if self.in_place:
            assert grad is not None
            self.hold(grad, grad)
        else:
            self._taken = grad
            table = self._table_for_copy()
            flatten([grad], table, matched=True)
            self.flat = table.flat
        return self.in_place

    def hold(self, grad: Tensor, memory: Tensor) -> None:
        """Let this gradient travel itself, in `memory`, which is that of the gradient for now."""
        # A flat view: the order of dimensions does not matter for a sum, and `grad.data = x` would move `grad`.
        self._taken, self.flat = grad, memory.as_strided((self._numel,), (1,))

    def clear(self) -> None:
        """Send zeros instead of the gradient."""
        try:
            self.flat = self._table_for_copy().flat.zero_()
        except Exception:  # there is no memory for a copy; the gradient is lost anyway
            if not self.in_place or self.flat is self._nothing:  # it was in the backward before
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
            # The copy belongs to the parameter if it was delivered before, and something failed after it.
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
        """Zero the gradients that were reduced in place. The sum may land in them after a program has zeroed them."""
        if self.in_place:
            self.flat.zero_()

    def forget(self) -> None:
        """Drop the references to what was taken."""
        self._taken, self.flat = None, self._nothing

    def _table_for_copy(self) -> PointerTable:
        if self._copy is None:
            with torch.inference_mode(False):  # what is made there cannot be written outside of it
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
