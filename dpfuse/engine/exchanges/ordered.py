"""Sums in the order of the ranks, of numbers or of eight-bit blocks: no bit depends on the layout of a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.comm.work import StagedWork
from dpfuse.engine.comm_buffer import PLAIN, Zeros
from dpfuse.engine.protocols import Exchange
from dpfuse.engine.streams import new_stream
from dpfuse_kernels import MxTable, PointerTable, Slot, dequantize, mx_bytes, quantize, sum_parts, sum_quantized
from dpfuse_kernels.mx import BLOCK, SUPER_BLOCK

__all__ = ["Blocks", "OrderedParts", "OrderedSum", "Rounding"]

STEP = 8  # elements: the parts of the ranks are whole multiples, for loads and stores of 128 bits
MANY = 16  # rows of a part, from which on it is worth to make it of whole rows


class Rounding(Protocol):
    """Keeps the rounding errors of sums."""

    def part(self, rank: int, size: int) -> Tensor | None:
        """Return where to add the rounding errors of this rank's part of the sum, [elements / size], or None."""


@dataclass(frozen=True)
class OrderedParts:
    """A communication buffer of plain numbers; each rank adds up one part of it.

    Args:
        size: number of ranks.
        row: the elements of a row; large parts are whole rows.
    """

    size: int
    row: int = STEP

    def places(self, numels: Sequence[int], room: int, dtype: str) -> tuple[list[int], int]:
        """As `Format.places`; the room follows the gradients, and ends the last rank's part."""
        offsets, length = PLAIN.places(numels, room, dtype)
        step = self.size * (self.row if length + room >= MANY * self.row * self.size else STEP)
        return offsets, -(-(length + room) // step) * step - room

    table = staticmethod(PLAIN.table)
    pack = staticmethod(PLAIN.pack)
    unpack = staticmethod(PLAIN.unpack)

    def add_up(self, parts: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Add up the rows of `parts` in float32 (float64 for float64), and round once."""
        sum_parts(parts, out, residual)


@dataclass(frozen=True)
class Blocks:
    """A buffer in MXFP8: blocks of 32 eight-bit numbers, each with a scale. No block belongs to two gradients.

    Values that are not finite arrive as NaN. Each rank adds up a part of whole super-blocks.

    Args:
        size: number of ranks.
        dtype: of the numbers, torch.float8_e4m3fn or torch.float8_e5m2.

    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """

    size: int
    dtype: torch.dtype

    def places(self, numels: Sequence[int], room: int, dtype: str) -> tuple[list[int], int]:
        """As `Format.places`; there is no room for a report, which needs its numbers exactly."""
        assert not room
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // BLOCK) * BLOCK
        step = SUPER_BLOCK * self.size
        return offsets, -(-end // step) * step

    def table(self, zeros: Zeros, numel: int, wire: str, slots: Sequence[Slot], dtype: torch.dtype) -> PointerTable:
        return MxTable(zeros(mx_bytes(numel), torch.uint8), slots, dtype, self.dtype)

    pack = staticmethod(quantize)

    def unpack(self, table: PointerTable, targets: Sequence[Tensor | None], scale: float, matched: bool) -> None:
        assert isinstance(table, MxTable)
        dequantize(table, targets, scale=scale, matched=matched)

    def add_up(self, parts: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Decode the rows of `parts`, add them up in float32, and encode the sum once."""
        sum_quantized(parts, out, format=self.dtype, residual=residual)


class OrderedSum(Exchange):
    """All-to-all of parts, a sum in the order of the ranks, all-gather of the sums: as many bytes as in a ring.

    An all-reduce adds up in an order that depends on where an element lies. Here each rank receives one part of the
    buffer from all ranks, and adds up and rounds once.

    Args:
        group: the ranks.
        format: of the buffer.
        rounding: keeps the rounding errors of this rank's part of the sum; None drops them.
    """

    def __init__(
        self, group: dist.ProcessGroup, format: OrderedParts | Blocks, rounding: Rounding | None = None
    ) -> None:
        super().__init__(group)
        self._format = format
        self._rounding = rounding
        self._parts: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, flat: Tensor) -> dist.Work:
        if self._parts is None:
            with torch.inference_mode(False):  # what is made there cannot be written outside of it
                self._parts = torch.empty_like(flat)
            self._stream = new_stream(flat.device)
        return StagedWork(self._stages(flat, self._parts), 2, device=flat.device)

    def started(self, work: dist.Work) -> None:
        # On CUDA all that follows is queued at once. On a CPU the wait does it.
        assert isinstance(work, StagedWork)
        if self._stream is not None:
            work.go_on_on(self._stream)

    def _stages(self, flat: Tensor, parts: Tensor) -> Iterator[dist.Work]:
        """Exchange the parts of `flat`, [ranks * part]; they come to `parts`. Gather their sums in `flat`."""
        rank, size = self.group.rank(), self.group.size()
        residual = None if self._rounding is None else self._rounding.part(rank, size)
        yield collective.start_all_to_all(parts, flat, self.group)
        # What this rank has sent was read, so its sum is written to its place in the gathered buffer.
        received, ours = parts.view(size, -1), flat.view(size, -1)[rank]
        error = None
        try:
            self._format.add_up(received, ours, residual)
        except Exception:
            try:
                self._format.add_up(received, ours, residual)  # memory may have been short for a moment
            except Exception as again:
                # The peers wait for this part. All bits set are NaN, in eight-bit blocks and in floating point.
                ours.view(torch.uint8).fill_(255)
                error = again
        yield collective.start_all_gather_into(flat, ours, self.group)
        if error is not None:
            raise error
