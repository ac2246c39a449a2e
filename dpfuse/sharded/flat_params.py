"""The parameters of one region of a bucket, as one flat tensor of which this rank updates a part."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dpfuse.comm import collective
from dpfuse.comm.waiting import board_of, finish
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse.sharded.gradient import ShardedGradient
from dpfuse.sharded.masters import Masters

__all__ = ["FlatParams"]


class FlatParams:
    """The parameters of one region. Each is a view of one flat tensor, in which it lies as its gradient in the region.

    Args:
        delivery: of the bucket's gradients.
        number: of the region in the bucket.
        group: the ranks.
        masters: whether this rank updates a float32 copy of its part, if the parameters have 16 bits.

    Attributes:
        delivery: as given; that of another bucket with the same communication buffer may take its place.
        number: as given.
        region: of that number.
        flat: the parameters, [elements].
        params: by place in this region, as all that follows.
        slots: where each parameter lies in the flat tensor.
        begin, end: of this rank's part of the flat tensor, in elements.
        masters: float32 copies of this rank's part, if there are any.
    """

    def __init__(self, delivery: ShardedDelivery, number: int, group: dist.ProcessGroup, *, masters: bool) -> None:
        self.delivery = delivery
        self.number = number
        self._group = group
        buffer, rank = delivery.buffer, group.rank()
        self.region = region = delivery.regions[number]
        self.bounds = [bound - region.begin for bound in region.bounds]
        self.begin, self.end = self.bounds[rank : rank + 2]
        self.params = [buffer.params[place] for place in region.places]
        slots = [buffer.gradients.slots[place] for place in region.places]
        self.slots = [replace(slot, offset=slot.offset - region.begin) for slot in slots]
        self.flat = torch.zeros(region.end - region.begin, dtype=buffer.dtype, device=buffer.flat.device)
        self.take()
        self.masters = Masters(self.flat[self.begin : self.end]) if masters and self.flat.element_size() == 2 else None

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self._group.rank()

    @property
    def own(self) -> Tensor:
        """What this rank's optimizer updates: its part of the parameters, or the float32 copy of it, [elements]."""
        return self.flat[self.begin : self.end] if self.masters is None else self.masters.values

    @property
    def gradients(self) -> Tensor:
        """The gradients of this rank's part, [elements], in the dtype of the parameters."""
        region, flat = self.region, self.delivery.buffer.flat
        return flat[region.begin + self.begin : region.begin + self.end]

    @property
    def sharded_gradients(self) -> list[ShardedGradient]:
        """What `.grad` of each parameter becomes."""
        return [self.delivery.grads[place] for place in self.region.places]

    @property
    def address(self) -> int:
        """Of the gradients of the region."""
        return self.delivery.parts[self.number].address

    def take(self) -> None:
        """Move those that do not lie in the flat tensor there, with their values."""
        with torch.no_grad():
            begin, size = self.flat.data_ptr(), self.flat.element_size()
            for param, slot in zip(self.params, self.slots, strict=True):
                if param.data_ptr() != begin + size * slot.offset:
                    view = self.flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(param)
                    # With a storage of its own over this memory: programs that save a model take tensors with one
                    # storage for copies of each other.
                    param.data = from_dlpack(view)

    def start_gather(self) -> dist.Work:
        """Start to send this rank's part to all, and to receive theirs."""
        return self._gather(self.flat)

    def gathered(self, part: Tensor) -> Tensor:
        """Return a flat tensor of the parts of all ranks; to be called on all ranks.

        Args:
            part: [elements], of any dtype.
        """
        whole = torch.empty(self.flat.numel(), dtype=part.dtype, device=part.device)
        whole[self.begin : self.end] = part
        finish(self._gather(whole), board_of(self._group), whole.device.type)
        return whole

    def whole_gradient(self, place: int) -> Tensor:
        """Return a copy of the averaged gradient of a parameter; to be called on all ranks."""
        region, buffer, slot = self.region, self.delivery.buffer, self.slots[place]
        flat = buffer.flat[region.begin : region.end]
        finish(self._gather(flat), board_of(self._group), flat.device.type)
        return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset).clone()

    def in_shape(self, flat: Tensor, place: int) -> Tensor:
        """Return a copy of what `flat`, as long as the flat tensor, holds for a parameter, in its shape."""
        slot = self.slots[place]
        return flat.as_strided(slot.shape, slot.stride, slot.offset).clone()

    def flattened(self, value: Tensor, place: int) -> Tensor:
        """Return the elements of a tensor like a parameter in the order in which they lie here, [elements]."""
        slot = self.slots[place]
        dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device)
        return dense.copy_(value).as_strided((slot.numel,), (1,))

    def own_range(self, begin: int, end: int) -> tuple[int, int]:
        """Return begin and end of what this rank has of a range of the flat tensor."""
        begin = min(max(begin, self.begin), self.end)
        return begin, max(min(end, self.end), begin)

    def _gather(self, flat: Tensor) -> dist.Work:
        if self.region.whole:
            return collective.start_all_gather_parts(flat, self.bounds, self._group)
        return collective.start_all_gather_into(flat, flat[self.begin : self.end], self._group)
