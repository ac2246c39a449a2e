"""What a wrapped model is told of a sharded optimizer: how its gradients travel, and what they are afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpfuse.comm.abilities import abilities_of
from dpfuse.comm.waiting import BETWEEN, READ, STEP, Doing
from dpfuse.engine.bucket_set import names_of
from dpfuse.engine.comm_buffer import CommBuffer, Format, Zeros
from dpfuse.engine.exchanges.tree import TreeSum
from dpfuse.engine.feature import Engine
from dpfuse.engine.plan import Bucket, BucketPlan
from dpfuse.engine.protocols import Delivery, Exchange
from dpfuse.engine.report_layout import Field
from dpfuse.errors import DPFuseError
from dpfuse.model.module_sync import Dividing, ModuleSync
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse.sharded.division import Division, Region
from dpfuse.sharded.groups import ParamGroups
from dpfuse.sharded.in_backward import DEPTH, DeliveryInBackward, InBackward, SumInBackward
from dpfuse.sharded.norm import ShardedGradients
from dpfuse.sharded.owners import assign_owners
from dpfuse.sharded.part_sum import Incoming, PartSum
from dpfuse.sharded.ring import Ring

__all__ = ["Sharding", "ShardingInBackward"]


class Sharding(Dividing):
    """Lets each rank receive one part of each bucket's averaged gradients.

    Args:
        field: what the ranks compare of the optimizer.

    Attributes:
        used: the buckets' gradients of the last backward that synchronised; buckets may change when it ends.
    """

    def __init__(self, sync: ModuleSync, field: Field) -> None:
        self.used: list[ShardedDelivery] = []
        self._before = self.used  # what `used` was before the backward that is running
        self._field = field
        self._grads, self._group = sync.grads, sync.grads.group
        self._fixed = sync.micro_loop is not None
        device = sync.grads.params[0].device
        scatters = abilities_of(self._group, device).scatters and not sync.options.common["deterministic"]
        self._incoming = Incoming(scatters=scatters)
        self._owners: dict[int, int] = {}  # the rank of a parameter that is needed whole, by its id; it never changes
        self._loads = [0.0] * self._group.size()  # what the updates of each rank's whole tensors cost

    def join(self, engine: Engine) -> None:
        engine.layout.compare(self._field)
        self._hear_at_once()

    def own(self, groups: ParamGroups) -> None:
        """Choose an owner for each parameter that is needed whole and has none.

        The ranks have the same groups, so they choose the same owners.
        """
        self.keeps_buckets = any(trainer.keeps_elsewhere for trainer in groups.trainers)
        items = [
            (id(param), trainer.cost(param.shape))
            for group, trainer in zip(groups.groups, groups.trainers, strict=True)
            for param in (group["params"] if trainer.needs_whole else ())
            if id(param) not in self._owners
        ]
        owners = assign_owners([cost for _, cost in items], self._loads)
        for (key, cost), owner in zip(items, owners, strict=True):
            self._owners[key] = owner
            self._loads[owner] += cost

    def format(self, bucket: Bucket, params: Sequence[Tensor]) -> Format:
        owners = tuple(self._owners.get(id(param)) for param in params)
        return Division(self._group.size(), owners, aligned=self._fixed)

    def exchange(self, order: int, bucket: Bucket, buffer: CommBuffer, usual: Exchange) -> Exchange:
        regions = _regions_of(buffer)
        return usual.divided(regions) if isinstance(usual, TreeSum) else PartSum(self._group, regions, self._incoming)

    def delivery(self, order: int, delivery: Delivery, buffer: CommBuffer) -> Delivery:
        return ShardedDelivery(buffer, _regions_of(buffer), self._group)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        self._before = self.used
        if sync and (now := self.deliveries()) != self.used:
            if all(param.grad is None for param in self._grads.params):
                self._before = now  # else the memory of the buckets before would live until this backward ends
            self.used = now

    def local_backward_ended(self, *, added: bool) -> None:
        self.used = self._before  # `torch.autograd.grad` opens a backward, and leaves all gradients as they are

    def delivered(self) -> None:
        self._before = self.used
        self._hear_at_once()  # models may have been wrapped meanwhile. All ranks come here, if none has failed

    def _hear_at_once(self) -> None:
        """Let backwards wait for their reports on a GPU, too: a step calls a collective before the next backward."""
        self._grads.hear_at_once()

    def spoil(self, wrong: Callable[[], Tensor], deliveries: Sequence[Delivery]) -> None:
        poison = torch.where(wrong(), math.nan, 0.0)
        for delivery in deliveries:
            if isinstance(delivery, ShardedDelivery):
                for region in delivery.parts:
                    region.part.add_(poison.to(region.part))

    def deliveries(self) -> list[ShardedDelivery]:
        """Return the gradients of each bucket that the next backward will use."""
        found = (bucket.parts.delivery for bucket in self._grads.reducer.buckets)
        return [delivery for delivery in found if isinstance(delivery, ShardedDelivery)]

    def gradients(self) -> ShardedGradients:
        named = zip(names_of(self._grads.plan), self._grads.params, strict=True)
        return ShardedGradients(named, self._group, self.telling(READ), by_rows=self._fixed)

    @contextmanager
    def telling(self, doing: Doing) -> Iterator[None]:
        """Tell the heartbeat what this rank does, so that ranks in different collectives are told apart."""
        track, completed = self._grads.track, self._grads.reducer.completed
        track.tell(doing, completed)
        try:
            yield
        finally:
            track.tell(BETWEEN, completed)


class ShardingInBackward(Sharding):
    """As `Sharding`, for gradients that are used up when a backward returns: few buckets have memory."""

    eager = False  # the memory of a bucket is that of others until it is sent
    in_backward = True

    def __init__(self, sync: ModuleSync, field: Field, in_backward: InBackward) -> None:
        super().__init__(sync, field)
        self._in_backward = in_backward
        self._known = frozenset(map(id, sync.grads.params))
        self._ring = Ring(sync.grads.plan, self._group.size(), DEPTH)

    def planned(self, plan: BucketPlan) -> None:
        self._ring = Ring(plan, self._group.size(), DEPTH)

    def format(self, bucket: Bucket, params: Sequence[Tensor]) -> Format:
        if not self._known.issuperset(map(id, params)):
            raise DPFuseError(
                f"rank {self._group.rank()}: the parameters of the model have changed, with step_in_backward=True, "
                "expected those with which the ShardedOptimizer was made. Leave step_in_backward out if parameters "
                "are added, replaced or unfrozen while training."
            )
        return super().format(bucket, params)

    def memory(self, device: str, usual: Zeros) -> Zeros:
        ring = self._ring
        return lambda numel, dtype: ring.take(numel, dtype, device)

    def exchange(self, order: int, bucket: Bucket, buffer: CommBuffer, usual: Exchange) -> Exchange:
        return SumInBackward(buffer, _regions_of(buffer), self._group, self._incoming, self._in_backward)

    def delivery(self, order: int, delivery: Delivery, buffer: CommBuffer) -> Delivery:
        return DeliveryInBackward(buffer, _regions_of(buffer), self._group, self._in_backward)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        super().backward_begins(sync=sync, announced=announced)
        if sync:
            self._in_backward.opens()

    def delivered(self) -> None:
        super().delivered()
        with self.telling(STEP):
            self._in_backward.ended()

    def backward_failed(self) -> None:
        self._in_backward.failed()

    def _hear_at_once(self) -> None:
        if self._in_backward.adds_up:
            super()._hear_at_once()

    def spoil(self, wrong: Callable[[], Tensor], deliveries: Sequence[Delivery]) -> None:
        self._in_backward.updates.spoil(wrong())


def _regions_of(buffer: CommBuffer) -> Sequence[Region]:
    assert isinstance(buffer.format, Division)
    return buffer.format.regions([slot.numel for slot in buffer.gradients.slots], buffer.averaging.dtype)
