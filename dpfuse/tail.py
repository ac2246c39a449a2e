"""What travels behind the last slot of the last bucket: who failed, and which parameters were used somewhere.

It is summed with the gradients, so it costs no collective of its own; it counts neither in a plan nor in its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

__all__ = ["Tail"]


class Tail:
    """One element per rank, above zero where that rank failed, then one per parameter, above zero where used.

    The elements are scaled like gradients, and summed in the buffer's dtype. Only zero or not zero is ever
    read from them, and that survives both, since they start as the reciprocal of that factor.

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
        self._copy: Tensor | None = None  # of an earlier step's failures, in pinned memory
        self._copied: torch.cuda.Event | None = None

    def source(self, dtype: torch.dtype, device: torch.device, unused: Collection[int], failed: bool) -> Tensor:
        """What this rank packs, [numel].

        Args:
            dtype: that of the gradients.
            device: theirs.
            unused: registration indices of parameters without a contribution from this rank.
            failed: whether this rank's backward was interrupted or met an error.
        """
        if self._all_well is None:
            limits = torch.finfo(dtype)
            size = min(max(abs(self._one), limits.smallest_normal), limits.max)
            self._one = math.copysign(size, self._one)
            self._all_well = torch.full((self.numel,), self._one, dtype=dtype, device=device)
            self._all_well[: self.world_size] = 0
        if not unused and not failed:
            return self._all_well
        source = self._all_well.clone()
        source[self.rank] = self._one if failed else 0.0
        if unused:
            source[[self.world_size + index for index in unused]] = 0
        return source

    def landed(self, view: Tensor) -> None:
        """Note where the summed tail lies, [numel]; valid until the bucket is packed again."""
        self._landed = view

    def used_somewhere(self, indices: Collection[int]) -> set[int]:
        """Those of `indices` that some rank used. Waits for the device."""
        assert self._landed is not None
        flags = self._landed[self.world_size :].tolist()
        return {index for index in indices if flags[index]}

    def failed_ranks(self, *, wait: bool) -> list[int]:
        """The ranks that reported a failure.

        Args:
            wait: read this step's report even if that means waiting for the device. Otherwise a CUDA
                tail is copied without waiting, and the report of the step before is returned.
        """
        assert self._landed is not None
        if self.world_size == 1 and not wait:
            return []  # nobody else could have failed
        failures = self._landed[: self.world_size]
        if wait or not failures.is_cuda:
            return self._ranks(failures)
        if torch.cuda.is_current_stream_capturing():
            return []
        failed: list[int] = []
        if self._copy is None or self._copied is None:
            self._copy = torch.zeros(self.world_size, dtype=failures.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()
        else:
            self._copied.synchronize()
            failed = self._ranks(self._copy)
        self._copy.copy_(failures, non_blocking=True)
        self._copied.record()
        return failed

    def _ranks(self, failures: Tensor) -> list[int]:
        if not failures.any():
            return []
        return [rank for rank, value in enumerate(failures.tolist()) if value]
