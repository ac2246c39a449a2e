"""The usual exchange: one all-reduce of the communication buffer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import collective
from dpfuse.engine.protocols import Exchange

__all__ = ["AllReduce"]


class AllReduce(Exchange):
    """Sums the buffer over the ranks.

    Args:
        group: the ranks.
        device: of the buffer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._direct = collective.direct_all_reduce(device, group)
        self.ends_in_order = collective.is_in_order(device, group)

    def start(self, flat: Tensor) -> dist.Work:
        return collective.all_reduce(flat, self.group) if self._direct is None else self._direct(flat)
