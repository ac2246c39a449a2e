"""The rule of DPF-L02: an optimizer makes step after step on gradients of this rank alone."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from dpfuse.findings import NOTHING_AVERAGED, findings
from dpfuse.loop.never_averaged import NeverAveraged
from dpfuse.loop.record import Record
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["LocalSteps"]

STEPS = 20  # in a row


class LocalSteps:
    """Counts steps on local gradients.

    No backward is averaged in that time, so the ranks compare nothing. Local SGD looks the same and is right: the
    finding goes to a log. If no backward was averaged before either, the ranks compare what they had in the end.

    Args:
        watched: a gradient of the optimizer.
        record: of the model whose gradients are averaged.

    Attributes:
        count: of such steps in a row.
    """

    def __init__(self, watched: WatchedGradient, record: Record) -> None:
        self._watched = watched
        self._record = record
        self.count = 0
        self._never: NeverAveraged | None = None

    def before_step(self, optimizer: Optimizer, *, averaged: bool, local: bool) -> None:
        """Count this step, and say what was found.

        Args:
            optimizer: is about to step.
            averaged: whether a backward was synchronised since its last step.
            local: whether one was not, and went through an output of the wrapper.
        """
        if averaged:
            self.count = 0
            if self._never is not None:
                self._never.stop()
                self._never = None
        elif local and self._watched.locals:
            self.count += 1
            name, record = type(optimizer).__name__, self._record
            if self.count == 1 and not record.averages and record.group.size() > 1 and dist.is_initialized():
                self._never = NeverAveraged(self._watched, record, name)
            if self._never is not None and not self._never.before_step(self.count):
                self._never = None
            if self.count == STEPS:
                self._say(name)
                if self._never is not None:
                    self._never.compare_at_exit()

    def _say(self, optimizer: str) -> None:
        rank = self._record.rank
        findings.note(
            NOTHING_AVERAGED,
            rank,
            f"rank {rank}: {optimizer} made {self.count} steps in a row on gradients of this rank alone. No backward "
            "was synchronised in this time. If the ranks are not to train apart, leave no_sync(), or set "
            "require_backward_grad_sync to True, before the forward of the last batch before a step.",
        )
