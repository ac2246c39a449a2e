"""Writes what has arrived into a module's buffers, and replaces those that the graph of a forward may still need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfuse.engine.torch_private import UNSHARED, owners_and_holders

__all__ = ["BufferWriter"]


class BufferWriter:
    """Gives buffers of a module new values.

    A graph that saved a buffer must find the value that it saved. So a buffer that something besides the module holds
    is not written to: the module gets a new tensor in its place. What cannot be replaced is written to, and autograd
    refuses a graph that saved it. That is a buffer that shares its memory with other tensors of the module, one that
    requires a gradient, and one of another class than Tensor.

    Args:
        module: that has the buffers.
        buffers: to write to.
    """

    def __init__(self, module: nn.Module, buffers: Sequence[Tensor]) -> None:
        self._module = module
        self._buffers = list(buffers)
        self._storages = [buffer.untyped_storage() for buffer in self._buffers]  # the keys are valid while these live
        self._keys = [storage._cdata for storage in self._storages]
        self._usual = tuple([count] * len(self._buffers) for count in UNSHARED)

    def __call__(self, values: list[Tensor]) -> None:
        """Write these values, one for each buffer, or replace the buffer."""
        counts = owners_and_holders(self._buffers, self._keys)
        buffers = self._buffers
        if counts != self._usual:
            places = self._to_replace(counts)
            for place in places:
                self._replace(buffers[place], values[place])
            kept = [place for place in range(len(buffers)) if place not in places]
            buffers, values = [buffers[place] for place in kept], [values[place] for place in kept]
        if buffers:
            with torch.inference_mode():  # writes to tensors that were made in this mode, too, and counts versions
                torch._foreach_copy_(buffers, values)

    def _to_replace(self, counts: tuple[list[int], list[int]]) -> set[int]:
        """Return the places of the buffers that a graph may hold, and that can be replaced."""
        found = set()
        owned = self._tensors_by_memory()
        for place, (owners, holders) in enumerate(zip(*counts, strict=True)):
            buffer = self._buffers[place]
            if (owners, holders) == (self._usual[0][place], self._usual[1][place]):
                continue
            sharing = [other for other in owned.get(self._keys[place], ()) if other is not buffer]
            # Views keep their base alive, and a scripted module owns its buffers itself.
            known_owners = UNSHARED[0] + sum(other._base is buffer for other in sharing) + self._scripts_with(buffer)
            if (owners, holders) == (known_owners, UNSHARED[1] + len(sharing)):
                self._usual[0][place], self._usual[1][place] = owners, holders
            elif not sharing and type(buffer) is Tensor and not buffer.requires_grad and not buffer.is_inference():
                found.add(place)
        return found

    def _replace(self, buffer: Tensor, value: Tensor) -> None:
        """Let the module have a new tensor wherever it has `buffer`."""
        with torch.inference_mode(False), torch.no_grad():
            new = torch.empty_like(buffer).copy_(value)
        new.__dict__.update(buffer.__dict__)  # such as the marks of torch.nn.Buffer
        for child in self._module.modules():
            for table in (child._buffers, child.__dict__):
                for name in [name for name, each in table.items() if each is buffer]:
                    table[name] = new

    def _scripts_with(self, buffer: Tensor) -> int:
        scripts = (child for child in self._module.modules() if isinstance(child, torch.jit.ScriptModule))
        return sum(any(each is buffer for each in child._buffers.values()) for child in scripts)

    def _tensors_by_memory(self) -> dict[int, list[Tensor]]:
        """Return each tensor that the module has once, also in its attributes, by the memory that it uses."""
        found: dict[int, list[Tensor]] = {}
        seen: set[int] = set()
        for tensor in self._tensors():
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if plain and id(tensor) not in seen:
                seen.add(id(tensor))
                found.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return found

    def _tensors(self) -> Iterator[Tensor]:
        for child in self._module.modules():
            for table in (child._parameters, child._buffers, child.__dict__):
                for value in table.values():
                    several: Iterable[Any] = (value,)
                    if isinstance(value, dict):
                        several = value.values()
                    elif isinstance(value, (list, tuple)):
                        several = value
                    yield from (each for each in several if isinstance(each, Tensor))
