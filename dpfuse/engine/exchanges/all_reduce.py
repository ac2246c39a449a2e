"""The usual exchange: one all-reduce of the communication buffer."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.engine.protocols import Exchange

__all__ = ["AllReduce"]


class AllReduce(Exchange):
    """Sums the buffer over the ranks."""

    def start(self, flat: Tensor) -> dist.Work:
        return collective.all_reduce(flat, self.group)
