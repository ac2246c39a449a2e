"""The gradients of one bucket, of which each rank keeps one part."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.protocols import Delivery
from dpfuse.engine.torch_private import Hooks
from dpfuse.errors import DPFuseError
from dpfuse.sharded.division import Region
from dpfuse.sharded.gradient import RegionPart, ShardedGradient

__all__ = ["ShardedDelivery"]


class ShardedDelivery(Delivery):
    """`.grad` stands for a gradient in the parts of all ranks, and has no memory of its own.

    It is handed out when the communication buffer is sent, so that private gradients are freed while backward goes on.
    Where another hook still has to read an accumulated gradient, it is handed out at the end.

    Attributes:
        parts: this rank's part of each region.
        grads: what `.grad` becomes, by place.
    """

    in_backward = False  # whether the gradients are used up when a backward returns

    def __init__(self, buffer: CommBuffer, regions: Sequence[Region], group: dist.ProcessGroup) -> None:
        self.buffer = buffer
        self.regions = regions
        self.parts: list[RegionPart] = []
        found: dict[int, ShardedGradient] = {}
        flat, rank = buffer.flat, group.rank()
        for region in regions:
            begin, end = region.bounds[rank : rank + 2]
            # Without the padding after the last gradient: the norm is then bitwise that of whole gradients.
            last = max(min(end, region.begin + region.length), begin)
            address = flat.data_ptr() + region.begin * flat.element_size()
            part = RegionPart(flat[begin:last], address, len(region.places), group, self.in_backward)
            self.parts.append(part)
            for place in region.places:
                slot = buffer.gradients.slots[place]
                first = min(max(slot.offset, begin), end)
                own = flat[first : max(first, min(slot.offset + slot.numel, end))]
                start = first - slot.offset
                found[place] = ShardedGradient(buffer.params[place], buffer.names[place], own, part, start)
        self.grads = [found[place] for place in range(len(buffer.params))]
        self._hooks = Hooks(buffer.params)
        self._handed_out = False
        self._kept: list[tuple[Tensor, Tensor]] = []  # parts of gradients from a backward before, and their values

    def prepare(self, grads: list[Tensor | None], *, complete: bool) -> None:
        """Keep what the backward before has left of parameters that are frozen now: zeros will be sent there."""
        left = [grad.own for grad in grads if isinstance(grad, ShardedGradient)]
        self._kept = [(own, own.clone()) for own in left]

    def hand_out_early(self, missing: Set[int]) -> None:
        self._handed_out = self._hooks.are_ours
        if self._handed_out:
            self._hand_out(missing)

    def deliver(self, missing: Collection[int], untouched: Set[int]) -> bool:
        indices = self.buffer.indices
        if not self._handed_out:
            self._hand_out(untouched)
        elif missing:
            self._hand_out(set(indices).difference(missing).union(untouched))
        for own, values in self._kept:
            own.copy_(values)
        self._kept = []
        return not untouched or untouched.isdisjoint(indices)

    def discard(self) -> None:
        self._kept = []
        for param, grad in zip(self.buffer.params, self.grads, strict=True):
            if param.grad is grad:
                param.grad = None

    def _hand_out(self, but: Set[int]) -> None:
        for param, index, grad in zip(self.buffer.params, self.buffer.indices, self.grads, strict=True):
            if index not in but:
                try:
                    param.grad = grad
                except RuntimeError as error:
                    raise DPFuseError(
                        f"parameter {grad.name_of_param!r} has the shape {tuple(param.shape)} and the dtype "
                        f"{param.dtype}, expected {tuple(grad.shape)} and {grad.dtype}, for which its bucket was made. "
                        "Assign parameters of another kind to the module, instead of changing them in place."
                    ) from error
