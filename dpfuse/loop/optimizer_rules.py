"""What is known of one optimizer: which of its gradients is watched, and the rules that look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.autograd import hooks_on
from dpfuse.loop.facts import LoopFacts
from dpfuse.loop.local_rest import LocalRest
from dpfuse.loop.local_steps import LocalSteps
from dpfuse.loop.watched_gradient import WatchedGradient, is_plain

__all__ = ["OptimizerRules", "best_of"]

SMALL = 8  # elements, of which fewer can hardly tell how they have changed


class OptimizerRules:
    """Chooses the gradient of one optimizer, and has the rules look at it.

    Args:
        facts: of the model whose gradients are averaged.
        suspect: has the ranks compare their weights; see `LocalRest`.

    Attributes:
        watched: the gradient; None if the optimizer has none of the model.
    """

    def __init__(self, facts: LoopFacts, suspect: Callable[[str], bool]) -> None:
        self.watched: WatchedGradient | None = None
        self._facts = facts
        self._suspect = suspect
        self._rules: tuple[LocalRest, LocalSteps] | None = None
        self._missed = 0  # steps without a gradient to look at
        self._rates: list[Any] | None = None  # at the last step, of all groups

    def rates_changed(self, optimizer: Optimizer) -> bool:
        """Whether a learning rate is another one than at the last step."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        before, self._rates = self._rates, rates
        if before is None or (len(before) == len(rates) and all(map(is_, before, rates))):
            return False
        # Those on a device are not read.
        now, then = ([rate for rate in each if type(rate) is float] for each in (rates, before))
        return now != then

    def before_step(self, optimizer: Optimizer, spares: Sequence[WatchedGradient]) -> None:
        """Have the rules look.

        Args:
            optimizer: is about to step.
            spares: gradients that were watched so far, of which it may own some.
        """
        watched = self.watched
        if watched is None or watched.param.grad is None:
            self._missed += 1
            if self._missed & (self._missed - 1):  # searching takes time, so it is done at powers of two
                return
            watched = self._choose(optimizer, spares)
        if watched is None or not watched.is_new:
            return
        assert self._rules is not None
        for rule in self._rules:
            rule.before_step(optimizer)
        watched.stepped()

    def _choose(self, optimizer: Optimizer, spares: Sequence[WatchedGradient]) -> WatchedGradient | None:
        wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
        fitting = {name: param for name, param in self._facts.params().items() if id(param) in wanted and fits(param)}
        if not fitting:
            return self.watched
        own = {spare.name: spare for spare in spares if spare.name in fitting}
        best = best_of({name: fitting[name] for name in own or fitting})
        if own:  # a head may be in one loss of several, so the parameter that most backwards have written tells most
            most = max(own[name].length for name, _ in best)
            best = [(name, param) for name, param in best if own[name].length == most]
        name, param = best[-1]
        watched = self.watched = own[name] if own else WatchedGradient(param, name, self._facts.rank)
        self._rules = LocalRest(watched, self._suspect), LocalSteps(watched, self._facts)
        return watched


def fits(param: Tensor) -> bool:
    """Whether the gradient of `param` is there, and can be watched: dense, real, and averaged by one wrapper only."""
    grad = param.grad
    if grad is None or not (is_plain(param) and is_plain(grad)):
        return False
    dense = grad.layout is torch.strided and grad.dtype is param.dtype and not grad.is_complex()
    return dense and len(hooks_on(param)) == 1


def best_of(params: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the parameters, by name, whose gradients can tell most: matrices, else all but small ones, else all."""
    ways: list[Callable[[Tensor], bool]] = [lambda param: param.ndim > 1, lambda param: True]
    for way in ways:
        found = [(name, param) for name, param in params.items() if way(param) and param.numel() >= SMALL]
        if found:
            return found
    return list(params.items())
