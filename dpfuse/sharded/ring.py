"""Memory for the gradients of few buckets, which all buckets of a model use in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from dpfuse.engine.param_spec import ITEM_SIZE
from dpfuse.engine.plan import ALIGNMENT, BucketPlan
from dpfuse_kernels.squared_norm import ROW

__all__ = ["Ring"]


class Ring:
    """As many pieces of memory as buckets can be in flight, `depth`, each large enough for every bucket of a plan."""

    def __init__(self, plan: BucketPlan, size: int, depth: int) -> None:
        most = 0
        for bucket in plan.buckets:
            # Each gradient may end with padding, and so does each rank's part, in at most two regions.
            padding = ALIGNMENT * len(bucket.params) + 2 * size * ROW * ITEM_SIZE[bucket.dtype]
            most = max(most, bucket.nbytes + padding)
        self._nbytes = -(-most // ALIGNMENT) * ALIGNMENT
        self._depth = depth
        self._pieces: list[Tensor] = []
        self._next = 0

    def take(self, numel: int, dtype: torch.dtype, device: str) -> Tensor:
        """Return the next piece as a flat tensor of zeros, [numel]; other buckets have it, too."""
        if len(self._pieces) < self._depth:
            self._pieces.append(torch.zeros(self._nbytes, dtype=torch.uint8, device=device))
        piece = self._pieces[self._next % len(self._pieces)]
        self._next += 1
        return piece[: numel * dtype.itemsize].view(dtype)
