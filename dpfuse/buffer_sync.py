"""Buffers that are to be those of one rank: where they are, and how they travel. Knows no parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.collective import FlatBroadcast

__all__ = ["BufferSync"]

Place = tuple[dict[str, Tensor | None], str]  # a module's buffers, and a name in there


class BufferSync:
    """Overwrites a module's buffers with those of one rank, in one broadcast per device.

    Args:
        module: whose buffers.
        ignored: names of buffers to leave alone.
        group: process group.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: dist.ProcessGroup) -> None:
        self._ignored = ignored
        self._group = group
        self._dicts = {prefix: child._buffers for prefix, child in module.named_modules()}
        self._counts: list[int] = []  # what the places below were made for
        self._places: list[Place] = []
        self._buffers: list[Tensor | None] = []  # what was there at the last look
        self._broadcasts: list[FlatBroadcast] = []

    def look(self) -> None:
        """Find the buffers that there are; they may be added, or replaced by hand or by .to(), at any time."""
        counts = list(map(len, self._dicts.values()))
        if counts != self._counts:
            self._counts = counts
            self._places = [
                (buffers, key)
                for prefix, buffers in self._dicts.items()
                for key in buffers
                if (f"{prefix}.{key}" if prefix else key) not in self._ignored
            ]
        buffers = [place.get(key) for place, key in self._places]
        if len(buffers) != len(self._buffers) or not all(map(is_, buffers, self._buffers)):
            self._buffers = buffers
            self._broadcasts = self._broadcasts_of(buffers)

    def send(self, source: int) -> None:
        """Overwrite the buffers with those of rank `source`; all ranks have the same ones."""
        self.look()
        for broadcast in self._broadcasts:
            broadcast(source)

    def send_as_before(self, source: int) -> None:
        """The same for the buffers of the last look, although there may be others here by now.

        One that was converted since travels as what it was. One that is gone, or of another shape, is left alone.
        """
        if not self._counts:
            self.look()
        stand_ins = [None if buffer is None else buffer.clone() for buffer in self._buffers]
        now = [place.get(key) for place, key in self._places]
        pairs = [
            (stand_in, buffer)
            for stand_in, buffer in zip(stand_ins, now, strict=True)
            if stand_in is not None and buffer is not None and stand_in.shape == buffer.shape
        ]
        with torch.no_grad():
            for stand_in, buffer in pairs:
                stand_in.copy_(buffer)
            for broadcast in self._broadcasts_of(stand_ins):
                broadcast(source)
            for stand_in, buffer in pairs:
                buffer.copy_(stand_in)

    def _broadcasts_of(self, found: Sequence[Tensor | None]) -> list[FlatBroadcast]:
        buffers = [buffer for buffer in found if buffer is not None]
        devices = dict.fromkeys(buffer.device for buffer in buffers)  # in the same order on every rank
        return [FlatBroadcast([item for item in buffers if item.device == device], self._group) for device in devices]
