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
from dpfuse.engine.optimizer_step_hook import call_before_steps
from dpfuse.engine.streams import capturing
from dpfuse.engine.sync import GradSync
from dpfuse.loop.local_rest import check_rest
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["LoopCheck", "loop_features"]

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
        self._of: WeakKeyDictionary[Optimizer, WatchedGradient] = WeakKeyDictionary()
        self._without: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and their number of groups
        self._spares: list[WatchedGradient] | None = None
        self._steps = 0  # of optimizers that own a parameter of the model
        self._runs = False  # whether a backward was opened and has not ended
        self._announced = False
        call_before_steps(self)

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
            watched.backward_begins()

    def left(self, *, added: bool) -> None:
        """As `Feature.left`."""
        self._runs = False
        if added:
            for watched in self._watched:
                watched.local_ends(announced=self._announced)

    def delivered(self) -> None:
        """As `Feature.delivered`."""
        self._runs = False
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
        if self._runs or self._spares is None or capturing():
            return
        watched = self._of.get(optimizer)
        if watched is None or watched.param.grad is None:
            watched = self._choose(optimizer, watched)
        if watched is None:
            return
        check_rest(watched, type(optimizer).__name__, self._grads().group.rank(), raises=self._raises)
        watched.stepped()
        if self._spares:
            self._steps += 1
            if self._steps >= KNOWN:
                self._spares = []
                self._watched = list(self._of.values())

    def _choose(self, optimizer: Optimizer, before: WatchedGradient | None) -> WatchedGradient | None:
        """Choose a gradient of this optimizer to watch, which must be there now; None if it owns none of the model."""
        if self._without.get(optimizer) == len(optimizer.param_groups):
            return None
        names = self._names()
        wanted = {id(param) for group in optimizer.param_groups for param in group["params"]} & names.keys()
        if not wanted:
            self._without[optimizer] = len(optimizer.param_groups)
            return None
        spares = [spare for spare in self._spares or () if id(spare.param) in wanted and fits(spare.param)]
        chosen = spares[-1] if spares else self._another(wanted, names)
        if chosen is None:
            return before
        self._of[optimizer] = chosen
        self._watched = list({id(each): each for each in (*(self._spares or ()), *self._of.values())}.values())
        return chosen

    def _another(self, wanted: set[int], names: dict[int, str]) -> WatchedGradient | None:
        fitting = [param for param in self._grads().params if id(param) in wanted and fits(param)]
        return WatchedGradient(fitting[-1], names[id(fitting[-1])]) if fitting else None

    def _names(self) -> dict[int, str]:
        grads = self._grads()
        return {id(param): name for param, name in zip(grads.params, names_of(grads.plan), strict=True)}

    def _first_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a few parameters from all parts of the model, by name."""
        grads = self._grads()
        pairs = [
            (name, param)
            for name, param in zip(names_of(grads.plan), grads.params, strict=True)
            if param.numel() >= SMALL and not param.is_complex()
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
