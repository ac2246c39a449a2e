"""What all rules of one model share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from dpfuse.findings import Level

__all__ = ["LoopFacts"]


class LoopFacts:
    """What is known of a model whose gradients are averaged, as the rules see it.

    Args:
        params: returns its parameters that are averaged, by name.
        rank: of this process.
        group: of processes that average.
        on_gpu: whether the parameters are on a GPU.
        level: what becomes of a finding.

    Attributes:
        averages: how many backwards were synchronised so far.
        others: how many were not, and went through an output of the wrapper.
        due: whether words travel with the next synchronised backward.
    """

    def __init__(
        self,
        params: Callable[[], Mapping[str, Tensor]],
        rank: int,
        group: dist.ProcessGroup,
        *,
        on_gpu: bool,
        level: Level,
    ) -> None:
        self.params = params
        self.rank = rank
        self.group = group
        self.on_gpu = on_gpu
        self.level: Level = level
        self.averages = self.others = 0
        self.due = False
