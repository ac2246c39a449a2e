"""The memory that is compared between ranks: found again where the model changes. Hashes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dpfuse.engine.comm_buffer import dense_stride
from dpfuse.engine.inner_tensors import memories_of
from dpfuse.engine.local_part import LocalPart, leaf_of
from dpfuse.weights.hashing import Hashing, Hold

__all__ = ["ComparedTensors", "Model"]


class Model(Protocol):
    """What knows whether a model has changed.

    Attributes:
        looks: a number that changes where the model may have other tensors.
    """

    looks: int


class _Memory(NamedTuple):
    memory: Tensor  # of the parameter, or of what has its values
    param: Tensor
    path: str  # of attributes, from one to the other


class ComparedTensors:
    """The tensors of a model that ranks can compare.

    Args:
        tensors: returns the parameters to compare, by name.
        model: knows where `tensors` may return others.
        hold: how the hashing refers to the parameters; see `Hashing`.

    Attributes:
        model: as given; read in each step, without a call.
        made_for: its number when tensors were last looked for.
        hashing: hashes what was found then; None if there is nothing that can be compared.
        ids: of the parameters that were found.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], model: Model, hold: Hold | None) -> None:
        self.model = model
        self.made_for = -1
        self.hashing: Hashing | None = None
        self.ids: set[int] = set()
        self._tensors = tensors
        self._hold = hold
        # When the model was wrapped, the ranks have compared them.
        self._strides = {name: dense_stride(each.memory) for name, each in self.memories().items()}
        self._common = set(self._strides)  # names that all ranks have, as far as is known

    def look(self, device: torch.device) -> list[str]:
        """Find the tensors on this device again; return the names of those that cannot be compared."""
        # A frozen module may be added on one rank, such as what it evaluates with. Ranks agree on what is trained.
        looks, found = self.model.looks, self.memories()
        self._common |= {name for name, each in found.items() if each.param.requires_grad}
        found = {name: each for name, each in found.items() if name in self._common}
        kept = {name: each for name, each in found.items() if _is_plain(each.memory, device)}
        held = {id(each.memory): self._held(each) for each in kept.values()}
        tensors = {name: each.memory for name, each in kept.items()}
        self.hashing = Hashing(tensors, self._strides, device, lambda memory: held[id(memory)]) if kept else None
        self.ids = {id(leaf_of(each.param)) for each in kept.values()}
        self.made_for = looks
        return [name for name in found if name not in kept]

    def memories(self) -> dict[str, _Memory]:
        """Return what is compared, by name."""
        return {
            name + path: _Memory(memory, param, path)
            for name, param in self._tensors().items()
            for path, memory in memories_of(param).items()
        }

    def are_others(self, names: Collection[str], params: Sequence[Tensor]) -> bool:
        """Whether none of these names is that of one of these parameters, which are found by identity.

        A module that was put into another one gives its parameters other names.
        """
        ids, found = {id(leaf_of(param)) for param in params}, self.memories()
        return not any(id(leaf_of(found[name].param)) in ids for name in names if name in found)

    def _held(self, each: _Memory) -> Callable[[], Tensor | None]:
        """Return what finds this memory again: a parameter may have another one inside by then."""
        param = repeat(each.param).__next__ if self._hold is None else self._hold(each.param)
        return param if each.memory is each.param else partial(_inside, param, each.path)


def _inside(param: Callable[[], Tensor | None], path: str) -> Tensor | None:
    found = param()
    return None if found is None else memories_of(found).get(path)


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether the bits of a tensor are on this rank, and can be read."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, LocalPart)
    return plain and tensor.layout is torch.strided and tensor.device == device and not tensor.is_meta
