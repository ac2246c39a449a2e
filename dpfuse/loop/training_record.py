"""What is written down of the training of one model. The journal and the check of the loop write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from dpfuse.findings import Level

__all__ = ["TrainingRecord"]


class TrainingRecord:
    """What has happened so far in the training of a model whose gradients are averaged.

    Args:
        params: returns its parameters that are averaged, by name.
        group: of processes that average.
        level: what becomes of a finding.

    Attributes:
        rank: of this process.
        on_gpu: whether the parameters are on a GPU, from the first backward on.
        averages: how many backwards were synchronised so far.
        local_backwards: how many were not, and went through an output of the wrapper.
        runs: whether a backward was opened and has not ended.
        announced: whether an output of the wrapper has told of that one.
        trains: whether the module was in training mode in the last forward; None before the first one.
        due: whether words travel with the next synchronised backward.
        heard: whether such words have arrived since the last step.
        looks: whether a rule looks at the gradients that the next one averages, or at what ranks tell each other then.
    """

    def __init__(self, params: Callable[[], Mapping[str, Tensor]], group: dist.ProcessGroup, level: Level) -> None:
        self.params = params
        self.group = group
        self.level: Level = level
        self.rank = group.rank()
        self.averages = self.local_backwards = 0
        self.on_gpu = self.runs = self.announced = self.due = self.heard = self.looks = False
        self.trains: bool | None = None
