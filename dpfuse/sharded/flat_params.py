"""The parameters of one region of a bucket, as one flat tensor of which this rank updates a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.waiting import board_of, finish
from dpfuse.errors import DPFuseError
from dpfuse.sharded.delivery import ShardedDelivery
from dpfuse.sharded.gradient import ShardedGradient
from dpfuse.sharded.held_memory import is_held, move_into
from dpfuse.sharded.masters import Masters

__all__ = ["FlatParams", "Kind", "kind_of", "refuse_shared", "take", "words_of"]

Kind = tuple[torch.Size, torch.dtype, torch.device]
_kind_facts = attrgetter("shape", "dtype", "device")


class FlatParams:
    """The parameters of one region. Each is a view of one flat tensor, in which it lies as its gradient in the region.

    A parameter whose memory others use stays where it is. It is copied to its place before a step, and back after it.

    Args:
        number: of the region in the bucket.
        masters: whether this rank updates a float32 copy of its part, if the parameters have 16 bits.

    Attributes:
        delivery: of the bucket's gradients; that of another bucket with the same communication buffer may take its
            place.
        flat: the parameters, [elements].
        params: by place in this region, as all that follows.
        slots: where each parameter lies in the flat tensor.
        kinds: shape, dtype and device of each parameter there.
        begin, end: of this rank's part of the flat tensor, in elements.
        apart: the parameters that stay where they are, by place, each with its place in the flat tensor.
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
        self.kinds = [(torch.Size(slot.shape), self.flat.dtype, self.flat.device) for slot in self.slots]
        self.apart: dict[int, tuple[Tensor, Tensor]] = {}
        self._left: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * len(self.params)  # where `put` left each one
        take([self])
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

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [self.delivery.buffer.names[place] for place in self.region.places]

    def converted(self) -> list[int]:
        """Return the places of the parameters that are of another kind than in the flat tensor."""
        found = list(map(_kind_facts, self.params))
        return [] if found == self.kinds else [i for i, kind in enumerate(found) if kind != self.kinds[i]]

    def displaced(self) -> list[int]:
        """Return the places of the parameters that lie elsewhere, or in another order."""
        now = list(zip(map(Tensor.data_ptr, self.params), map(Tensor.stride, self.params), strict=True))
        return [] if now == self._left else [i for i, each in enumerate(now) if each != self._left[i]]

    def put(self, place: int, value: Tensor, *, stays: bool) -> None:
        """Give a parameter its place in the flat tensor, with this value; `stays` keeps its memory where it is."""
        param, slot = self.params[place], self.slots[place]
        view = self.flat.as_strided(slot.shape, slot.stride, slot.offset).copy_(value)
        self.apart.pop(place, None)
        if stays:
            self.apart[place] = param, view
        else:
            move_into(param, view)
        self._left[place] = param.data_ptr(), param.stride()

    def read(self) -> None:
        """Copy what this rank updates of the parameters that stay where they are to the flat tensor."""
        own = [
            pair
            for place, pair in self.apart.items()
            if self.slots[place].offset < self.end and self.slots[place].offset + self.slots[place].numel > self.begin
        ]
        if own:
            torch._foreach_copy_([view for _, view in own], [param for param, _ in own])

    @torch.no_grad()
    def write(self) -> None:
        """Copy the updated values of all ranks back to the parameters that stay where they are."""
        if self.apart:
            params, views = zip(*self.apart.values(), strict=True)
            torch._foreach_copy_(params, views)

    def add(self, number: Tensor) -> None:
        """Add a number, [], to all parameters."""
        for each in (self.flat, *(param.detach() for param, _ in self.apart.values())):
            each.add_(number.to(each))

    def holds(self, address: int) -> bool:
        """Whether this address lies in the flat tensor."""
        return 0 <= address - self.flat.data_ptr() < self.flat.nbytes

    def start_gather(self) -> Callable[[], None]:
        """Start to send this rank's part to all, and to receive theirs; return what waits until they are there."""
        work = self._gather(self.flat)

        def arrive() -> None:
            finish(work, board_of(self._group), self.flat.device.type)
            self.write()

        return arrive

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
        flat = self.delivery.buffer.flat[self.region.begin : self.region.end]
        finish(self._gather(flat), board_of(self._group), flat.device.type)
        return self.in_shape(flat, place)

    def in_shape(self, flat: Tensor, place: int) -> Tensor:
        """Return a copy of what `flat`, as long as the flat tensor, holds for a parameter, in its shape."""
        slot = self.slots[place]
        return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset).clone()

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


@torch.no_grad()
def take(regions: Sequence[FlatParams]) -> None:
    """Move parameters that do not lie in their flat tensors there, with their values; copy those that stay elsewhere.

    Raises:
        DPFuseError: a parameter is of another kind than in the last backward, or shares memory with another one.
    """
    for region in regions:
        for place in region.converted():
            raise DPFuseError(
                f"parameter {region.names[place]!r} is {words_of(kind_of(region.params[place]))} in a step, expected "
                f"{words_of(region.kinds[place])}, as in the backward before. Change a parameter between step() and "
                "the next forward, on all ranks."
            )
    moved = [(region, place) for region in regions for place in region.displaced()]
    if moved:
        _move(regions, moved)
    for region in regions:
        region.read()


def _move(regions: Sequence[FlatParams], moved: Sequence[tuple[FlatParams, int]]) -> None:
    refuse_shared((name, param) for region in regions for name, param in zip(region.names, region.params, strict=True))
    stay = [is_held(region.params[place]) for region, place in moved]
    values: list[Tensor] = []
    for (region, place), stays in zip(moved, stay, strict=True):
        value = region.params[place].detach()
        inside = any(each.holds(value.data_ptr()) for each in regions)
        if inside and stays:
            raise DPFuseError(
                f"parameter {region.names[place]!r} got the memory of another parameter, which a view that the program "
                "keeps uses, too; expected memory of its own. A ShardedOptimizer needs that memory for the other one: "
                "assign a clone(), or drop the view."
            )
        # Two parameters may have changed places: all are read before one is written.
        values.append(value.clone() if inside else value)
    for (region, place), value, stays in zip(moved, values, stay, strict=True):
        region.put(place, value, stays=stays)


def refuse_shared(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise DPFuseError if two of these parameters surely have an element of their memory in common."""
    end, before = 0, ""
    for begin, nbytes, name in sorted(_stretches(named)):
        if begin < end:
            raise DPFuseError(
                f"parameters {before!r} and {name!r} share memory, expected memory of its own for each: a "
                "ShardedOptimizer updates each by itself, and one update would be lost. Use one nn.Parameter in both "
                "places, or assign a clone()."
            )
        end, before = begin + nbytes, name


def _stretches(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, int, str]]:
    """Yield address, bytes and name. Of a parameter with gaps, in which another may lie, only the first element."""
    for name, param in named:
        if param.numel():
            length = 1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
            yield param.data_ptr(), param.element_size() * (length if length == param.numel() else 1), name


def kind_of(param: Tensor) -> Kind:
    """Return what a parameter is now: shape, dtype and device."""
    kind: Kind = _kind_facts(param)
    return kind


def words_of(kind: Kind) -> str:
    """Return a kind in words."""
    shape, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
