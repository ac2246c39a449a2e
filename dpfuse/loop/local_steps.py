"""The rule of DPF-L02: an optimizer makes step after step on gradients of this rank alone."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from dpfuse.findings import NOTHING_AVERAGED, findings
from dpfuse.loop.facts import LoopFacts
from dpfuse.loop.never_averaged import NeverAveraged
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["LocalSteps"]

STEPS = 20  # in a row


class LocalSteps:
    """Counts steps on local gradients.

    No backward is averaged in that time, so the ranks compare nothing. Local SGD looks the same and is right: the
    finding goes to a log. If no backward was averaged before either, the ranks compare what they had in the end.

    Args:
        watched: a gradient of the optimizer.
        facts: of the model whose gradients are averaged.
    """

    def __init__(self, watched: WatchedGradient, facts: LoopFacts) -> None:
        self._watched = watched
        self._facts = facts
        self._before = facts.averages, facts.others  # at the last step
        self._steps = 0
        self._never: NeverAveraged | None = None

    def before_step(self, optimizer: Optimizer) -> None:
        """Count this step, and say what was found."""
        means, others = self._facts.averages, self._facts.others
        if means != self._before[0]:
            self._steps = 0
            if self._never is not None:
                self._never.stop()
                self._never = None
        elif others != self._before[1] and self._watched.locals:
            self._steps += 1
            name = type(optimizer).__name__
            if self._steps == 1 and not means and self._facts.group.size() > 1 and dist.is_initialized():
                self._never = NeverAveraged(self._watched, self._facts, name)
            if self._never is not None and not self._never.before_step(self._steps):
                self._never = None
            if self._steps == STEPS:
                self._say(name)
                if self._never is not None:
                    self._never.compare_at_exit()
        self._before = means, others

    def _say(self, optimizer: str) -> None:
        rank = self._facts.rank
        findings.note(
            NOTHING_AVERAGED,
            rank,
            f"rank {rank}: {optimizer} made {self._steps} steps in a row on gradients of this rank alone. No backward "
            "was synchronised in this time. If the ranks are not to train apart, leave no_sync(), or set "
            "require_backward_grad_sync to True, before the forward of the last batch before a step.",
        )
