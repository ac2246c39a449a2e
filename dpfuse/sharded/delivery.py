"""The gradients of one bucket, of which each rank keeps one part."""

from __future__ import annotations

from collections.abc import Collection, Set

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.buffer import Buffer
from dpfuse.engine.protocols import Delivery
from dpfuse.engine.torch_private import Hooks
from dpfuse.sharded.gradient import BucketPart, ShardedGradient

__all__ = ["ShardedDelivery"]


class ShardedDelivery(Delivery):
    """`.grad` stands for a gradient in the parts of all ranks, and has no memory of its own.

    It is handed out when the buffer is sent, so that private gradients are freed while backward goes on. Where another
    hook still has to read an accumulated gradient, it is handed out at the end.

    Args:
        buffer: is divided evenly among the ranks.
        group: the ranks.

    Attributes:
        buffer: as given.
        begin, end: of this rank's part of the buffer, in elements.
        part: this rank's part.
        grads: what `.grad` becomes, by place.
    """

    def __init__(self, buffer: Buffer, group: dist.ProcessGroup) -> None:
        self.buffer = buffer
        length = buffer.flat.numel() // group.size()
        self.begin, self.end = length * group.rank(), length * (group.rank() + 1)
        slots = buffer.gradients.slots
        # Without the padding behind the last gradient: the norm is then bitwise that of whole gradients.
        own = self._own(0, slots[-1].offset + slots[-1].numel)
        self.part = BucketPart(own, buffer.flat.data_ptr(), len(slots), group)
        self.grads = [
            ShardedGradient(param, name, self._own(slot.offset, slot.numel), self.part)
            for param, name, slot in zip(buffer.params, buffer.names, slots, strict=True)
        ]
        self._hooks = Hooks(buffer.params)
        self._handed_out = False

    def _own(self, offset: int, numel: int) -> Tensor:
        begin = min(max(offset, self.begin), self.end)
        return self.buffer.flat[begin : max(begin, min(offset + numel, self.end))]

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
        return not untouched or untouched.isdisjoint(indices)

    def discard(self) -> None:
        for param, grad in zip(self.buffer.params, self.grads, strict=True):
            if param.grad is grad:
                param.grad = None

    def _hand_out(self, but: Set[int]) -> None:
        for param, index, grad in zip(self.buffer.params, self.buffer.indices, self.grads, strict=True):
            if index not in but:
                param.grad = grad
