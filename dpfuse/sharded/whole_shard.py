"""The whole tensors of one region that this rank owns, with the optimizer that updates each tensor by itself."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.errors import DPFuseError
from dpfuse.sharded.flat_params import FlatParams
from dpfuse.sharded.groups import MASTER, ParamGroups, State, Updater

__all__ = ["WholeShard"]


class WholeShard:
    """The parameters of a region, each in the part of one rank, its owner. It updates them once `use_kept` was called.

    Args:
        groups: the number of the parameter group of each parameter, by place.
    """

    def __init__(
        self, flat_params: FlatParams, param_groups: ParamGroups, groups: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self.flat_params = flat_params
        self._param_groups = param_groups
        self._groups = groups
        self._group = group
        own, begin = flat_params.own, flat_params.begin
        self._places: list[int] = []  # of what this rank owns
        self._own: list[Tensor] = []  # what it owns, each in the shape of its parameter
        for place, slot in enumerate(flat_params.slots):
            if slot.numel and flat_params.begin <= slot.offset < flat_params.end:
                offset = own.storage_offset() + slot.offset - begin
                self._places.append(place)
                self._own.append(own.as_strided(slot.shape, slot.stride, offset))
        self._kept: dict[int, State] = {}
        self._stepped: set[int] = set()  # places of parameters that have a state, on whichever rank
        self._kept_places: set[int] = set()  # of those whose state was kept, on whichever rank
        self.updater = Updater(param_groups, [])

    def step(self, settings: Sequence[Mapping[str, Any]], touched: Sequence[bool]) -> None:
        """As `ElementwiseShard.step`."""
        flat_params = self.flat_params
        masters, gradients = flat_params.masters, flat_params.gradients
        if masters is not None:
            masters.follow()
            gradients = gradients.float()
        grads: list[Tensor | None] = []
        for place in self._places:
            slot = flat_params.slots[place]
            offset = gradients.storage_offset() + slot.offset - flat_params.begin
            grads.append(gradients.as_strided(slot.shape, slot.stride, offset) if touched[place] else None)
        self.updater.step(settings, grads)
        self._stepped.update(place for place, each in enumerate(touched) if each)
        if masters is not None:
            masters.write()

    def has_state(self, place: int) -> bool:
        """Whether the parameter at this place was updated; the same on all ranks."""
        return place in self._stepped

    def forget(self, places: Collection[int]) -> None:
        """Drop the states of the parameters at these places, as if they had never been updated."""
        self._stepped.difference_update(places)
        for index, place in enumerate(self._places):
            if place in places:
                self.updater.forget(index)

    def whole_states(self) -> Iterator[tuple[Tensor, State, Collection[str]]]:
        """Yield each parameter, its state as a plain optimizer has it, and that nothing of it is divided.

        To be called on all ranks. Owners send the states of this region to all.
        """
        own: dict[int, State] = {}
        for index, place in enumerate(self._places):
            own[place] = dict(self.updater.state(index))
            if self.flat_params.masters is not None:
                own[place][MASTER] = self._own[index].clone()
        states: dict[int, State] = {}
        for each in _of_all_ranks(own, self._group, self.flat_params.flat.device):
            states |= each
        for place, param in enumerate(self.flat_params.params):
            yield param, states.get(place, {}), ()

    def keep(self, place: int, state: State, divided: Collection[str]) -> None:
        """Keep the state of a parameter for `use_kept`, if this rank owns it; nothing of it is divided."""
        if state:
            self._kept_places.add(place)
        if place not in self._places:
            return
        kept = dict(state)
        master = kept.pop(MASTER, None)
        if self.flat_params.masters is not None:
            param = self.flat_params.params[place]
            self._own[self._places.index(place)].copy_(param.detach() if master is None else master)
            kept = {key: _widened(value) for key, value in kept.items()}
        self._kept[place] = kept

    def use_kept(self) -> None:
        """Use the states that were kept, in place of all that there are."""
        self.updater.leave(self.flat_params.rank)
        members = [(self._groups[place], own) for place, own in zip(self._places, self._own, strict=True)]
        self.updater = Updater(self._param_groups, members)
        for index, place in enumerate(self._places):
            if self._kept.get(place):
                self.updater.set_state(index, self._kept[place])
        self._kept = {}
        self._stepped, self._kept_places = self._kept_places, set()


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def _of_all_ranks(own: dict[int, State], group: dist.ProcessGroup, device: torch.device) -> Iterator[dict[int, State]]:
    """Yield the states of every rank, whatever lies in them; to be called on all ranks.

    Raises:
        DPFuseError: torch's loader of weights refuses something in them; raised on every rank.
    """
    file = io.BytesIO()
    torch.save(own, file)
    sent = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8).to(device)
    sizes = collective.all_gather(torch.tensor([sent.numel()], device=device), group)
    for rank, size in enumerate(int(each) for each in sizes):
        row = sent if rank == group.rank() else torch.empty(size, dtype=torch.uint8, device=device)
        collective.broadcast(row, group, rank)
        try:  # also on the rank that has sent them, so that all ranks fail together
            yield torch.load(io.BytesIO(row.cpu().numpy().tobytes()), map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            first, _, _ = str(error).partition("\n")
            raise DPFuseError(
                f"rank {group.rank()}: rank {rank} has a state of a whole tensor that cannot be sent, expected "
                f"tensors, numbers, texts, lists and dicts: {first}. Let the optimizer keep only those."
            ) from error
