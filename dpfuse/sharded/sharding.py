"""What a wrapped model is told of a sharded optimizer: how its gradients travel, and what they are afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.buffer import Buffer
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import Delivery, Exchange
from dpfuse.engine.streams import SideStream
from dpfuse.model.module_sync import Dividing
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse.sharded.norm import ShardedGradients
from dpfuse.sharded.part_sum import Incoming, PartSum

__all__ = ["Sharding"]


class Sharding(Dividing):
    """Lets each rank receive one part of each bucket's averaged gradients.

    Args:
        group: the ranks.
        named: returns the parameters of the model, and their names.
        finish: waits for parameters that are on their way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        named: Callable[[], Sequence[tuple[str, Tensor]]],
        finish: Callable[[], None],
    ) -> None:
        self._group = group
        self._finish = finish
        self._named = named
        self._incoming = Incoming()

    def exchange(self, order: int, bucket: Bucket, buffer: Buffer, usual: Exchange) -> Exchange:
        return PartSum(self._group, self._incoming)

    def measured(self, order: int, delivery: Delivery, buffer: Buffer, side: SideStream | None) -> Delivery:
        return ShardedDelivery(buffer, self._group)

    def gradients(self) -> ShardedGradients:
        return ShardedGradients(self._named(), self._group)

    def finish(self) -> None:
        self._finish()
