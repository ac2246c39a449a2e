"""Watches the gradients of one model from backward to step, and asks the rules before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.autograd import hooks_on
from dpfuse.engine.bucket_set import names_of
from dpfuse.engine.feature import Feature
from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps
from dpfuse.engine.streams import capturing
from dpfuse.engine.sync import GradSync
from dpfuse.engine.torch_private import has_hooks_of_others
from dpfuse.loop.changed_gradients import ChangedGradients
from dpfuse.loop.cut_windows import CutWindows
from dpfuse.loop.local_rest import check_rest
from dpfuse.loop.local_steps import LocalSteps
from dpfuse.loop.never_stepped import NeverStepped
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["LoopCheck", "loop_features"]


class OptimizerRules:
    """What is known of one optimizer: one of its gradients, and the rules that look at it.

    Args:
        watched: the gradient.
        counts: returns how many backwards were synchronised so far, and how many were not, through an output.
        hooked: returns whether a parameter of the model has a hook of the program.
        rank: of this process.
    """

    def __init__(
        self, watched: WatchedGradient, counts: Callable[[], tuple[int, int]], hooked: Callable[[], bool], rank: int
    ) -> None:
        self.watched = watched
        self.local_steps = LocalSteps(watched, counts, hooked, rank)
        self.rules = (self.local_steps, CutWindows(watched, rank), ChangedGradients(watched, rank))


SPARES = 8  # gradients that are watched until the optimizers are known
KNOWN = 4  # steps, after which no more optimizer is expected
SMALL = 8  # elements, of which too few can tell how they have changed


class LoopCheck(Feature):
    """Watches one gradient of each optimizer. Costs the same for 10 parameters and for 1,000.

    Args:
        grads: returns the synchronisation of the gradients, once there is one.
        raises: whether a step on gradients that only one rank has is an error.
    """

    def __init__(self, grads: Callable[[], GradSync], *, raises: bool) -> None:
        self._grads = grads
        self._raises = raises
        self._watched: list[WatchedGradient] = []
        self._of: WeakKeyDictionary[Optimizer, OptimizerRules] = WeakKeyDictionary()
        self._without: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and their number of groups
        self._spares: list[WatchedGradient] | None = None
        self._steps = 0  # of optimizers that own a parameter of the model
        self._runs = False  # whether a backward was opened and has not ended
        self._announced = False
        self._counts = (0, 0)  # of backwards that were synchronised, and of others through an output
        self._never_stepped: NeverStepped | None = None
        self._looking: list[LocalSteps] = []  # at weights, behind steps
        call_before_steps(self)
        call_after_steps(self)

    # --- Backwards ---

    def opened(self, *, sync: bool, announced: bool) -> None:
        """As `Feature.opened`."""
        if self._runs:  # the one before has died, after it had added to some gradients
            self._forget()
        self._runs, self._announced = True, announced
        if self._spares is None:
            self._spares = [WatchedGradient(param, name) for name, param in self._first_params()]
            self._watched = list(self._spares)
        for watched in self._watched:
            watched.backward_begins(announced=announced)
        for rule in self._looking:
            rule.backward_begins()

    def left(self, *, added: bool) -> None:
        """As `Feature.left`."""
        self._runs = False
        if added:
            self._counts = self._counts[0], self._counts[1] + self._announced
            for watched in self._watched:
                watched.local_ends(announced=self._announced)

    def delivered(self) -> None:
        """As `Feature.delivered`."""
        self._runs = False
        self._counts = self._counts[0] + 1, self._counts[1]
        if self._never_stepped is not None:
            self._never_stepped.averaged()
        for watched in self._watched:
            watched.mean_ends()

    def _forget(self) -> None:
        for watched in self._watched:
            watched.forget()

    # --- Steps ---

    def before_step(self, optimizer: Optimizer) -> None:
        """Ask the rules, unless it is a step inside a backward.

        Raises:
            DPFuseError: the gradients are not the mean over the ranks.
        """
        if self._spares is None or capturing():
            return
        if self._never_stepped is None:
            self._never_stepped = NeverStepped(self._params(), self._grads().group.rank())
        if not self._never_stepped.decided:
            self._never_stepped.before_step(optimizer)
        if self._runs:
            return
        known = self._of.get(optimizer)
        if known is None or known.watched.param.grad is None:
            known = self._choose(optimizer, known)
        if known is None or not known.watched.is_new:
            return
        watched = known.watched
        check_rest(watched, type(optimizer).__name__, self._grads().group.rank(), raises=self._raises)
        for rule in known.rules:
            rule.before_step(optimizer)
        watched.stepped()
        if self._spares:
            self._steps += 1
            if self._steps >= KNOWN:
                self._spares = []
                self._watched = [each.watched for each in self._of.values()]

    def after_step(self, optimizer: Optimizer) -> None:
        """Let a rule that looks at weights do so."""
        known = self._of.get(optimizer)
        if known is not None and (known.local_steps.looks or self._looking):
            self._looking = [each.local_steps for each in self._of.values() if each.local_steps.looks]
            if known.local_steps.looks:
                known.local_steps.after_step()

    def _choose(self, optimizer: Optimizer, before: OptimizerRules | None) -> OptimizerRules | None:
        """Choose a gradient of this optimizer to watch, which must be there now; None if it owns none of the model."""
        if self._without.get(optimizer) == len(optimizer.param_groups):
            return None
        names = {id(param): name for name, param in self._params().items()}
        wanted = {id(param) for group in optimizer.param_groups for param in group["params"]} & names.keys()
        if not wanted:
            self._without[optimizer] = len(optimizer.param_groups)
            return None
        spares = [spare for spare in self._spares or () if id(spare.param) in wanted and fits(spare.param)]
        chosen = spares[-1] if spares else self._another(wanted, names)
        if chosen is None:
            return before
        made = OptimizerRules(chosen, lambda: self._counts, self._hooked, self._grads().group.rank())
        self._of[optimizer] = made
        in_use = [*(self._spares or ()), *(each.watched for each in self._of.values())]
        self._watched = list({id(each): each for each in in_use}.values())
        return made

    def _hooked(self) -> bool:
        return any(map(has_hooks_of_others, self._grads().params))

    def _another(self, wanted: set[int], names: dict[int, str]) -> WatchedGradient | None:
        fitting = [param for param in self._grads().params if id(param) in wanted and fits(param)]
        return WatchedGradient(fitting[-1], names[id(fitting[-1])]) if fitting else None

    def _params(self) -> dict[str, Tensor]:
        grads = self._grads()
        return dict(zip(names_of(grads.plan), grads.params, strict=True))

    def _first_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a few parameters from all parts of the model, by name."""
        pairs = [
            (name, param) for name, param in self._params().items() if param.numel() >= SMALL and not param.is_complex()
        ]
        yield from pairs[:: max(1, -(-len(pairs) // SPARES))]


def fits(param: Tensor) -> bool:
    """Whether the gradient of `param` is there, and can be watched: dense, and averaged by one wrapper only."""
    grad = param.grad
    dense = grad is not None and grad.layout is torch.strided and not grad.is_complex()
    return dense and len(hooks_on(param)) == 1


def loop_features(grads: Callable[[], GradSync], level: str) -> Sequence[Feature]:
    """Return what checks the loop of one model at this level of `check_loop`."""
    return () if level == "off" else (LoopCheck(grads, raises=level == "raise"),)
