"""What travels behind the last slot of the last bucket: how each rank is, which parameters were used, what was found.

It is summed with the gradients, so it costs no collective of its own; it counts neither in a plan nor in its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpfuse.engine.streams import capturing
from dpfuse.engine.window import TOP, Canary, Counts

__all__ = ["Report", "Tail"]


class Report(NamedTuple):
    """What the ranks tell each other."""

    failed: Sequence[int]
    changed: Sequence[int]  # their model is no longer that of the plan
    strayed: Sequence[Counts] = ()  # of all ranks, by rank, if they should be alike and are not

    @property
    def all_well(self) -> bool:
        """Whether the gradients are what they should be."""
        return not any(self)


ALL_WELL = Report((), ())
WIDTH = len(Counts._fields)
SHIFTS = (0, 8, 16, 24)  # where the digits of a weight lie in its bits


class Tail:
    """Some elements per rank, what its canary counts, then one per parameter, above zero where used, and one that is
    above zero where a rank has found values that are not finite. Last are four more per rank, for its weight.

    The first of a rank that failed is below zero, and of one whose model is no longer that of the plan zero. The
    elements are scaled like gradients, and summed in the buffer's dtype, but each rank adds zeros to those of the
    others: ranks that count alike have equal bits there. Flags and signs survive any rounding.

    Args:
        rank: of this process in the group.
        world_size: of the group.
        param_count: number of parameters of the plan.
        scale: what packing multiplies with; not 0.
        canary: what counts on this rank.

    Attributes:
        scale: what it multiplies with now.
    """

    def __init__(self, rank: int, world_size: int, param_count: int, scale: float, canary: Canary) -> None:
        self.rank = rank
        self.world_size = world_size
        self.canary = canary
        self._states = WIDTH * world_size  # elements that tell how the ranks are
        self._found = self._states + param_count
        self._weights = self._found + 1
        self.numel = self._weights + len(SHIFTS) * world_size
        self.scale = scale
        self._one = 1.0 / scale
        self._counts: Counts | None = None  # in `_all_well`
        self._all_well: Tensor | None = None
        self._well: list[float] = []  # what told last that all is well
        self._landed: Tensor | None = None
        self._landed_states: Tensor | None = None
        self._copy: Tensor | None = None  # of an earlier step's states, in pinned memory
        self._copy_one = 0.0  # what `_one` became there
        self._copied: torch.cuda.Event | None = None

    def source(
        self,
        dtype: torch.dtype,
        device: torch.device,
        unused: Collection[int],
        failed: bool,
        changed: bool = False,
    ) -> Tensor:
        """What this rank packs, [numel].

        Args:
            dtype: that of the gradients.
            device: theirs.
            unused: registration indices of parameters without a contribution from this rank.
            failed: whether this rank's backward was interrupted or met an error.
            changed: whether its model is no longer that of the plan; a failure is told instead.
        """
        counts, known = self.canary.counts, self._all_well
        if counts == self._counts and known is not None and not (unused or failed or changed):
            return known  # as in nearly every backward
        # What a graph is captured with is written at its replays, not now: nothing of it may be kept.
        keeps = (known is not None and counts == self._counts) or not self.deaf
        if known is None:
            known = self._unwritten(dtype, device)
        if counts != self._counts and keeps:
            self._all_well, self._counts = known, counts
            self._write(known, counts)
        if keeps and not (unused or failed or changed):
            return known
        source = known.clone()
        if not keeps:
            self._write(source, counts)
        if failed or changed:
            _put(source, WIDTH * self.rank, -self._one if failed else 0.0)
        if unused and self.deaf:
            for index in unused:  # a list of them would be uploaded, which a graph being captured refuses
                _put(source, self._states + index, 0.0)
        elif unused:
            source[[self._states + index for index in unused]] = 0
        return source

    @property
    def deaf(self) -> bool:
        """Whether a CUDA graph is being captured: nothing that is on the device can be read meanwhile."""
        return capturing()

    def landed(self, view: Tensor) -> None:
        """Note where the summed tail lies, [numel]; valid until the bucket is packed again."""
        if view is not self._landed:  # mostly it is that of the step before, and a slice costs a microsecond
            self._landed, self._landed_states = view, view[: self._states]

    def used_somewhere(self, indices: Collection[int]) -> set[int]:
        """Those of `indices` that some rank used. Waits for the device."""
        assert self._landed is not None
        flags = self._landed[self._states : self._found].tolist()
        return {index for index in indices if flags[index]}

    def write(self, packed: Tensor, source: Tensor) -> None:
        """Pack `source` by itself, as it is packed with gradients."""
        packed.copy_(source.double() * self.scale)  # it is its sign that counts

    def write_found(self, packed: Tensor, found: Tensor) -> None:
        """Write into what is packed, [numel], unscaled, what only the device knows: `found`, [], above zero or zero."""
        packed[self._found].copy_(found)

    def found_somewhere(self) -> Tensor:
        """Whether some rank has written a number above zero, as a bool, [], on the device. Waits for nothing."""
        assert self._landed is not None
        return self._landed[self._found] != 0

    def write_weight(self, packed: Tensor, weight: Tensor) -> None:
        """Likewise the weight of this rank, [] float32: its bits as four numbers, which every dtype holds."""
        bits = weight.view(torch.int32)
        place = self._weights + len(SHIFTS) * self.rank
        for shift in SHIFTS:
            packed[place + shift // 8].copy_((bits >> shift) & 255)

    def weights(self) -> Tensor:
        """Those of all ranks, [ranks] float32 on the device, the same bits everywhere. Waits for nothing."""
        assert self._landed is not None
        digits = self._landed[self._weights :].view(self.world_size, len(SHIFTS)).to(torch.int32)
        bits = digits[:, 0]
        for place in range(1, len(SHIFTS)):
            bits = bits | (digits[:, place] << SHIFTS[place])
        return bits.view(torch.float32)

    def report(self, *, wait: bool, failed: bool = False) -> Report:
        """Which ranks failed, which have another model, and what they count if that differs.

        Args:
            wait: read this step's report even if that means waiting for the device. Otherwise a CUDA
                tail is copied without waiting, and the report of the step before is returned.
            failed: whether this rank has: all that is known of anybody while a CUDA graph is captured.
        """
        states = self._landed_states
        assert states is not None
        if self.world_size == 1 and not wait:
            return ALL_WELL  # nobody else could have anything to tell
        if capturing():
            return Report((self.rank,), ()) if failed else ALL_WELL
        if wait or not states.is_cuda:
            values = states.tolist()
            return ALL_WELL if values == self._well else self._read(values, self._one * self.scale)
        before = ALL_WELL
        if self._copy is None or self._copied is None:
            self._copy = torch.zeros(self._states, dtype=states.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
        else:
            self._copied.synchronize()
            before = self._read(self._copy.tolist(), self._copy_one)
        self._copy.copy_(states, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(states.device))  # which need not be the current device
        self._copy_one = self._one * self.scale
        return before

    def alarm(self) -> Tensor:
        """Whether the report is not that all is well, as a bool, [], on the device. Waits for nothing.

        It is asked for where this rank itself has neither failed nor changed.
        """
        assert self._landed_states is not None
        rows = self._landed_states.view(self.world_size, WIDTH)
        if not self.canary.uneven:
            # Two small kernels: who tells something else than this rank is not well, or counts otherwise.
            return rows.ne(rows[self.rank]).any()
        elsewhere = rows[:, :1] > (TOP - 0.5) / TOP * self._one * self.scale
        low, high = rows.masked_fill(elsewhere, math.inf).amin(0), rows.masked_fill(elsewhere, -math.inf).amax(0)
        return (low < high).any() | (low[0] <= 0)

    def _unwritten(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What a rank packs that is well, but for what it counts."""
        limits = torch.finfo(dtype)
        size = min(max(abs(self._one), limits.smallest_normal), limits.max)
        self._one = math.copysign(size, self._one)
        source = torch.full((self.numel,), self._one, dtype=dtype, device=device)
        source[: self._states].zero_()
        source[self._found :].zero_()
        return source

    def _write(self, source: Tensor, counts: Counts) -> None:
        for place, count in enumerate(counts, WIDTH * self.rank):
            _put(source, place, count / TOP * self._one)

    def _read(self, values: list[float], one: float) -> Report:
        if values == values[:WIDTH] * self.world_size and values[0] > 0:
            self._well = values
            return ALL_WELL
        failed = [rank for rank, value in enumerate(values[::WIDTH]) if value < 0]
        changed = [rank for rank, value in enumerate(values[::WIDTH]) if value == 0]
        if failed or changed:
            return Report(failed, changed)
        rows = [values[at : at + WIDTH] for at in range(0, len(values), WIDTH)]
        active = [row for row in rows if row[0] < (TOP - 0.5) / TOP * one]  # the others compare with anything
        # It is the bits that count: a factor other than a power of two leaves no whole numbers in 16 bits.
        if all(row == active[0] for row in active):
            return ALL_WELL
        return Report((), (), [Counts(*(round(value * TOP / one) for value in row)) for row in rows])


def _put(source: Tensor, place: int, value: float) -> None:
    # Assigned to an item, or brought as a tensor, a number is uploaded, for which the host waits.
    source[place : place + 1].fill_(value)
