"""Writes what has arrived into a module's buffers, so that the graph of a forward keeps the values that it saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpfuse.engine.streams import capturing
from dpfuse.engine.torch_private import UNSHARED, owners_and_holders, owners_of, swap_contents
from dpfuse.model.memory_users import MemoryUsers, UserSearch
from dpfuse.model.shared_memory import is_outside

__all__ = ["BufferWriter"]


class BufferWriter:
    """Gives buffers of a module new values: the same tensors, which all that shares their memory sees.

    A graph that saved a buffer, or a view of it, must find the value that it saved. If the graph alone has the memory
    besides the module, the buffer gets other memory. If a program has it, too (a kept `state_dict()`, a view in a loss,
    another buffer), the program's tensors keep the memory, and what the graph has saved gets a copy. Where neither can
    be done, the write counts as one, and autograd refuses that graph.
    """

    def __init__(self, module: nn.Module, buffers: Sequence[Tensor]) -> None:
        self._module = module
        self._buffers = list(buffers)
        self._look_at_memory()
        self._usual = tuple([count] * len(self._buffers) for count in UNSHARED)
        self._scripts: list[nn.Module] = []
        self._search = UserSearch()
        self._searched: set[int] = set()  # places

    def _look_at_memory(self) -> None:
        self._storages = [buffer.untyped_storage() for buffer in self._buffers]  # the keys are valid while these live
        self._keys = [storage._cdata for storage in self._storages]

    def __call__(self, values: list[Tensor]) -> None:
        """Write these values, one for each buffer."""
        buffers = self._buffers
        if owners_and_holders(buffers, self._keys) != self._usual:
            changed = self._part_from_graphs(values)
            buffers, values = [buffers[place] for place in changed], [values[place] for place in changed]
        if buffers:
            with torch.inference_mode():  # writes to tensors that were made in this mode, too, and counts versions
                torch._foreach_copy_(buffers, values)

    def _part_from_graphs(self, values: Sequence[Tensor]) -> list[int]:
        """Let graphs keep what they have saved, and return the places of the buffers that must be written."""
        self._look_at_memory()  # `buffer.data = x` gives other memory
        self._scripts = [child for child in self._module.modules() if isinstance(child, torch.jit.ScriptModule)]
        parted, shared = [], []
        for place, counts in enumerate(zip(*owners_and_holders(self._buffers, self._keys), strict=True)):
            buffer = self._buffers[place]
            if counts == (self._usual[0][place], self._usual[1][place]) or not _is_plain(buffer):
                continue
            if counts[1] != UNSHARED[1] or is_outside(self._storages[place]):
                shared.append(place)
            elif counts[0] == UNSHARED[0] + self._scripts_with(buffer) or self._renew(buffer):
                parted.append(place)
        # Most of those that a graph has a view of, such as masks, never change.
        again = [] if capturing() else [place for place in shared if place in self._searched]
        equal = {place for place, same in zip(again, self._are_equal(again, values), strict=True) if same}
        parted += self._part_shared([place for place in shared if place not in equal])
        self._look_at_memory()
        for usual, now in zip(self._usual, owners_and_holders(self._buffers, self._keys), strict=True):
            for place in parted:
                usual[place] = now[place]
        return [place for place in range(len(self._buffers)) if place not in equal]

    def _are_equal(self, places: Sequence[int], values: Sequence[Tensor]) -> list[bool]:
        """Return whether buffers have the same bits as these values, which a GPU is asked for once."""
        pairs = ((self._buffers[place], values[place]) for place in places)
        bits = [[each.reshape(-1).view(torch.uint8) for each in pair] for pair in pairs]
        return torch.stack([(one == other).all() for one, other in bits]).tolist() if bits else []

    def _part_shared(self, places: Sequence[int]) -> list[int]:
        """Let no graph use the memory of buffers that others use, too, and return the places where that is so."""
        by_storage: dict[int, list[int]] = {}
        for place in places:
            by_storage.setdefault(self._keys[place], []).append(place)
        known = {
            self._storages[same[0]]: [*{id(each): each for each in map(self._buffers.__getitem__, same)}.values()]
            for same in by_storage.values()
        }
        self._searched.update(places)
        parted = []
        for (storage, buffers), same, users in zip(
            known.items(), by_storage.values(), self._search.users(known), strict=True
        ):
            if self._part(buffers[0], storage, users):
                parted += same
        return parted

    def _part(self, buffer: Tensor, storage: torch.UntypedStorage, users: MemoryUsers) -> bool:
        """Let no graph use the memory of a buffer. Return whether nothing else can be done while it has these users."""
        if not any(each is buffer for each in users.named):
            return False  # gc.freeze() hides it, so it may hide others
        with torch._C.DisableTorchFunctionSubclass():
            bases = [each._base for each in (*users.named, *users.saved)]
        owned = [UNSHARED[0] + self._scripts_with(each) + sum(base is each for base in bases) for each in users.named]
        if owners_of(users.named) == owned and not users.saved and not users.hidden:
            return True
        if len(users.named) == 1 and not is_outside(storage):
            return self._renew(buffer)
        if not all(_is_plain(each) and each.dtype == buffer.dtype for each in users.named):
            return True
        return not users.hidden and self._copy_for_graphs(buffer, users)

    def _renew(self, buffer: Tensor) -> bool:
        """Give a buffer other memory, with any values, if that is possible; graphs keep its old memory."""
        with torch.inference_mode(False), torch.no_grad():
            return self._exchange([buffer], [torch.empty_like(buffer)])

    def _copy_for_graphs(self, buffer: Tensor, users: MemoryUsers) -> bool:
        """Give graphs a copy of what they have saved of a buffer's memory, if that is possible."""
        with torch.inference_mode(False), torch.no_grad():
            same = buffer.data  # with versions of its own, since what is written does not concern the graphs
            others = [
                same if each is buffer else same.as_strided(each.shape, each.stride(), each.storage_offset()).detach()
                for each in users.named
            ]
            if not self._exchange(users.named, others):
                return False
            for each, owners in zip(others, owners_of(others), strict=True):
                if owners > UNSHARED[0]:  # those that graphs have
                    each.data = each.clone()
            for each in users.saved:
                each.data = each.clone()
        return True

    def _exchange(self, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Exchange the memory and the values of tensors with others. What C++ has of them is that of the others."""
        if not swap_contents(tensors, others):
            return False
        for tensor, other in zip(tensors, others, strict=True):
            for script in self._scripts:  # it has its buffers in C++
                for name in [name for name, each in script._buffers.items() if each is other]:
                    setattr(script, name, tensor)
        return True

    def _scripts_with(self, buffer: Tensor) -> int:
        return sum(any(each is buffer for each in script._buffers.values()) for script in self._scripts)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not (
        tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg()
    )
