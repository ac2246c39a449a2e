"""What travels behind the last slot of the last bucket: how each rank is, and which parameters were used somewhere.

It is summed with the gradients, so it costs no collective of its own; it counts neither in a plan nor in its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Report", "Tail"]


class Report(NamedTuple):
    """What the ranks tell each other."""

    failed: Sequence[int]
    changed: Sequence[int]  # their model is no longer that of the plan


ALL_WELL = Report((), ())


class Tail:
    """One element per rank, zero if all is well there, then one per parameter, above zero where used.

    A rank that failed has one above zero, and a rank whose model is no longer that of the plan one below. The
    elements are scaled like gradients, and summed in the buffer's dtype. Only their signs are ever read, and
    those survive both, since they start as the reciprocal of that factor.

    Args:
        rank: of this process in the group.
        world_size: of the group.
        param_count: number of parameters of the plan.
        scale: what packing multiplies with; not 0.
    """

    def __init__(self, rank: int, world_size: int, param_count: int, scale: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.numel = world_size + param_count
        self._one = 1.0 / scale
        self._all_well: Tensor | None = None
        self._landed: Tensor | None = None
        self._copy: Tensor | None = None  # of an earlier step's states, in pinned memory
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
        if self._all_well is None:
            limits = torch.finfo(dtype)
            size = min(max(abs(self._one), limits.smallest_normal), limits.max)
            self._one = math.copysign(size, self._one)
            self._all_well = torch.full((self.numel,), self._one, dtype=dtype, device=device)
            self._all_well[: self.world_size] = 0
        if not unused and not failed and not changed:
            return self._all_well
        source = self._all_well.clone()
        source[self.rank] = self._one if failed else -self._one if changed else 0.0
        if unused:
            source[[self.world_size + index for index in unused]] = 0
        return source

    @property
    def deaf(self) -> bool:
        """Whether a CUDA graph is being captured: nothing that is on the device can be read meanwhile."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def landed(self, view: Tensor) -> None:
        """Note where the summed tail lies, [numel]; valid until the bucket is packed again."""
        self._landed = view

    def used_somewhere(self, indices: Collection[int]) -> set[int]:
        """Those of `indices` that some rank used. Waits for the device."""
        assert self._landed is not None
        flags = self._landed[self.world_size :].tolist()
        return {index for index in indices if flags[index]}

    def report(self, *, wait: bool, failed: bool = False) -> Report:
        """Which ranks failed, and which have another model.

        Args:
            wait: read this step's report even if that means waiting for the device. Otherwise a CUDA
                tail is copied without waiting, and the report of the step before is returned.
            failed: whether this rank has: all that is known of anybody while a CUDA graph is captured.
        """
        assert self._landed is not None
        if self.world_size == 1 and not wait:
            return ALL_WELL  # nobody else could have anything to tell
        states = self._landed[: self.world_size]
        if self.deaf:
            return Report((self.rank,), ()) if failed else ALL_WELL
        if wait or not states.is_cuda:
            return _read(states)
        before = ALL_WELL
        if self._copy is None or self._copied is None:
            self._copy = torch.zeros(self.world_size, dtype=states.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
        else:
            self._copied.synchronize()
            before = _read(self._copy)
        self._copy.copy_(states, non_blocking=True)
        self._copied.record()
        return before


def _read(states: Tensor) -> Report:
    if not states.any():
        return ALL_WELL
    values = states.tolist()
    return Report(
        [rank for rank, value in enumerate(values) if value > 0],
        [rank for rank, value in enumerate(values) if value < 0],
    )
