"""Whose steps count: those of optimizers that step a compared parameter, whichever ends last of steps in each other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps

__all__ = ["Owner", "Owners", "RunningSteps", "Steps"]


class Owner(NamedTuple):
    """An optimizer.

    Attributes:
        groups: how many groups it had when it was looked at.
        steps: whether it steps a parameter that is compared.
    """

    groups: int
    steps: bool


class Owners:
    """The optimizers that were looked at.

    Attributes:
        found: those; a step reads it without a call. One that has got another group is to be looked at again.
    """

    def __init__(self) -> None:
        self.found: dict[ref[Optimizer], Owner] = {}

    def look_at(self, optimizer: Optimizer, compared: Callable[[], Collection[int]]) -> Owner:
        """Find whether an optimizer steps one of the parameters with these ids, and forget those that are freed."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owner = Owner(len(optimizer.param_groups), not params.isdisjoint(compared()))
        self.found = {each: found for each, found in self.found.items() if each() is not None}
        self.found[ref(optimizer)] = owner
        return owner


class RunningSteps:
    """The steps that run, of those that begin from when this is made on; a step may run inside another one.

    It is made by what hears steps already, which so hears the end of a step before this does.
    """

    def __init__(self) -> None:
        # Of each step that runs, the innermost last, whether another one has counted since it began.
        self._counted: WeakKeyDictionary[Optimizer, list[bool]] = WeakKeyDictionary()
        call_before_steps(self)
        call_after_steps(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`."""
        self._counted.setdefault(optimizer, []).append(False)

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        if running := self._counted.get(optimizer):
            running.pop()

    def counted(self) -> None:
        """Note that a step counts, which ends now."""
        for running in self._counted.values():
            running[:] = [True] * len(running)

    def is_outer(self, optimizer: Optimizer) -> bool:
        """Whether a step has counted inside the one that ends now. If its begin was not seen, the answer is no."""
        running = self._counted.get(optimizer) or [False]
        return running[-1]


class Steps:
    """What is known of the steps of this model.

    Most programs make one step after an average. What may begin and end around another one is heard only in others.

    Attributes:
        owners: whose steps they are.
        inside: whether a step has run inside the backward that runs and is to be averaged.
        running: those that run; None as long as all ended one after the other, as far as is known.
    """

    def __init__(self) -> None:
        self.owners = Owners()
        self.inside = False
        self.running: RunningSteps | None = None
