"""Buffers that are to be those of one rank: which there are, and how they travel. Knows no parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dpfuse.model.flat_broadcast import FlatBroadcast

__all__ = ["BufferKind", "BufferSync"]

END = (object(),)  # behind what is compared, so that lists of different lengths differ


class BufferKind(NamedTuple):
    """What must be equal on all ranks for a buffer that travels."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)} on {self.device}"


class BufferSync:
    """Overwrites a module's buffers with those of one rank, in one broadcast per device.

    Buffers may be replaced by others of their kind at any time. What travels stays what all ranks have agreed on
    until they agree on something else: at first, on the buffers that there are when this is made.

    Args:
        module: whose buffers.
        ignored: names of buffers to leave alone.
        group: process group.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: dist.ProcessGroup) -> None:
        self._module = module
        self._ignored = ignored
        self._group = group
        self._kinds: Mapping[str, BufferKind] = {}
        self._agreed: Mapping[str, BufferKind] = {}
        self._last: Mapping[str, Tensor] = {}  # those that travelled last; some may have been removed since
        self._broadcasts: list[FlatBroadcast] | None = None
        self._look()
        self._agreed = self._kinds

    def agree_on(self, kinds: Mapping[str, BufferKind], source: int) -> None:
        """From now on these travel, on every rank; those that could not until now do so at once, from rank `source`."""
        before = {name: kind.shape for name, kind in self._agreed.items()}
        new = [name for name, kind in kinds.items() if before.get(name) != kind.shape]
        self._agreed = kinds
        self._broadcasts = None
        with _unsafe_preserve_version_counter(self._counted):  # see send()
            for broadcast in self._broadcasts_of([self._found[name] for name in new]):
                broadcast(source)

    def look(self, *, again: bool = False) -> Mapping[str, BufferKind]:
        """The buffers that there are, by name: the same object for as long as that does not change.

        Args:
            again: modules may have been added or removed, not only buffers.
        """
        if again or any(self._empty) or not all(map(is_, chain.from_iterable(self._places), self._held)):
            self._look()
            self._broadcasts = None
        return self._kinds

    @property
    def found(self) -> Mapping[str, Tensor]:
        """The buffers that `look` has found: the same object for as long as none was replaced."""
        return self._found

    def change(self) -> str | None:
        """What differs between these and the ones that were agreed on, in words; None if nothing does."""
        for name, kind in self._kinds.items():
            before = self._agreed.get(name)
            if before is None:
                return f"buffer {name!r} was added"
            if before != kind:
                return f"buffer {name!r} was converted from {before} to {kind}"
        gone = next((name for name in self._agreed if name not in self._kinds), None)
        return None if gone is None else f"buffer {gone!r} was removed"

    @property
    def exist(self) -> bool:
        """Whether there are any here, or there were when the ranks last agreed."""
        return bool(self._agreed or self._kinds)

    def send(self, source: int) -> None:
        """Overwrite the buffers with those of rank `source`, in the agreed order, whichever there are here.

        One that was converted since travels in its old dtype. One that was removed or has another shape is left alone.
        """
        self.start(source)
        self.finish(source)

    def start(self, source: int) -> None:
        """Start `send`; `finish` must follow."""
        if self.look() is not self._agreed:
            self._send_stand_ins(source)
            return
        if self._broadcasts is None:
            self._last = self._found
            self._broadcasts = self._broadcasts_of([self._found[name] for name in self._agreed])
        for broadcast in self._broadcasts:
            broadcast.start(source)

    def finish(self, source: int) -> None:
        """Wait for what was started."""
        # The graph of an earlier forward may hold them. Its backward must not fail on the ranks that are written to:
        # batch norm, for one, takes two forwards before a backward, since its own updates do not count either.
        with _unsafe_preserve_version_counter(() if self._group.rank() == source else self._counted):
            for broadcast in self._broadcasts or ():
                broadcast.finish(wait=False)

    def _send_stand_ins(self, source: int) -> None:
        stand_ins = {
            name: torch.zeros(kind.shape, dtype=kind.dtype, device=kind.device) for name, kind in self._agreed.items()
        }
        pairs = self._pairs(stand_ins, self._found)
        with torch.no_grad(), _unsafe_preserve_version_counter(self._counted):
            for stand_in, buffer in (*self._pairs(stand_ins, self._last), *pairs):
                stand_in.copy_(buffer)
            for broadcast in self._broadcasts_of(list(stand_ins.values())):
                broadcast(source)
            if self._group.rank() != source:  # whose own may be more precise than what travelled
                for stand_in, buffer in pairs:
                    buffer.copy_(stand_in)

    @staticmethod
    def _pairs(stand_ins: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [
            (stand_in, buffers[name])
            for name, stand_in in stand_ins.items()
            if name in buffers and buffers[name].shape == stand_in.shape
        ]

    def _broadcasts_of(self, buffers: Sequence[Tensor]) -> list[FlatBroadcast]:
        devices = dict.fromkeys(buffer.device for buffer in buffers)  # in the same order on every rank
        return [FlatBroadcast([item for item in buffers if item.device == device], self._group) for device in devices]

    def _look(self) -> None:
        tables = [(prefix, child._buffers) for prefix, child in self._module.named_modules()]
        # Each shows what is there when it is read.
        self._places: list[Iterable[object]] = [*(table.values() for _, table in tables if table), END]
        self._empty = [table for _, table in tables if not table]
        self._held = [*chain.from_iterable(self._places)]
        named = ((f"{prefix}.{key}" if prefix else key, buf) for prefix, table in tables for key, buf in table.items())
        self._found = {name: buf for name, buf in named if buf is not None and name not in self._ignored}
        self._counted = tuple(buf for buf in self._found.values() if not buf.is_inference())  # whose writes count
        kinds = {name: BufferKind(buf.dtype, buf.shape, buf.device) for name, buf in self._found.items()}
        self._kinds = next((known for known in (self._agreed, self._kinds) if known == kinds), kinds)
