"""The tensors that use the memory of a buffer: those of a program, and those that only graphs have. Writes nothing."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from dpfuse.engine.torch_private import UNSHARED, holders_of, names_of

__all__ = ["MemoryUsers", "UserSearch"]


@dataclass(frozen=True)
class MemoryUsers:
    """The tensors that use one storage."""

    named: list[Tensor]  # that something in Python refers to
    saved: list[Tensor]  # that only C++ has: graphs
    hidden: int  # how many were made in C++, or cannot be found


class UserSearch:
    """Finds the users of storages, and remembers those that a program had."""

    def __init__(self) -> None:
        self._others: dict[int, list[ref[Tensor]]] = {}  # by the storage

    def users(self, known: Mapping[torch.UntypedStorage, Sequence[Tensor]]) -> list[MemoryUsers]:
        """Return the users of each storage, of which some are known.

        No part of torch lists them. So where some are not known, all objects of Python are looked at, which takes tens
        of milliseconds. What `gc.freeze()` has hidden is not found.
        """
        counts = {storage._cdata: holders_of(storage) - (UNSHARED[1] - 1) for storage in known}
        named = {storage._cdata: [*tensors, *self._remembered(storage._cdata)] for storage, tensors in known.items()}
        saved: dict[int, list[Tensor]] = {key: [] for key in counts}
        unknown = {key for key, count in counts.items() if len(named[key]) != count}
        if unknown:
            named.update((key, []) for key in unknown)
            found = _tensors_with(unknown)
            for tensor, names in zip(found, names_of(found), strict=True):
                (named if names else saved)[_storage_of(tensor)].append(tensor)
            own = {id(tensor) for tensors in known.values() for tensor in tensors}
            for key in unknown:
                self._others.pop(key, None)
                if others := [ref(each) for each in named[key] if id(each) not in own]:
                    self._others[key] = others
        return [
            MemoryUsers(named[key], saved[key], count - len(named[key]) - len(saved[key]))
            for key, count in counts.items()
        ]

    def _remembered(self, storage: int) -> list[Tensor]:
        tensors = (reference() for reference in self._others.get(storage, ()))
        return [each for each in tensors if each is not None and _storage_of(each) == storage]


def _tensors_with(storages: Collection[int]) -> list[Tensor]:
    # The type is asked, since a proxy may say of itself that it is a tensor.
    return [each for each in gc.get_objects() if Tensor in type(each).__mro__ and _storage_of(each) in storages]


def _storage_of(tensor: Tensor) -> int:
    with suppress(RuntimeError), torch._C.DisableTorchFunctionSubclass():  # sparse ones and some wrappers have none
        return int(Tensor.untyped_storage(tensor)._cdata)
    return 0
