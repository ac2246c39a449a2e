"""What is known of one optimizer: which of its gradients is watched, and the rules that look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.autograd import hooks_on
from dpfuse.loop.local_rest import LocalRest
from dpfuse.loop.local_steps import LocalSteps
from dpfuse.loop.record import Record
from dpfuse.loop.watched_gradient import WatchedGradient, has_plain_class

__all__ = ["OptimizerRules", "best_of"]

RATE = methodcaller("get", "lr")  # of a group
SMALL = 8  # elements, of which fewer can hardly tell how they have changed


class OptimizerRules:
    """Chooses the gradient of one optimizer, and has the rules look at it.

    Args:
        record: of the model whose gradients are averaged.
        suspect: has the ranks compare their weights; see `LocalRest`.
        rates_changed: called with the number of averages where a learning rate is another one than at the last step.

    Attributes:
        watched: the gradient; None if the optimizer has none of the model.
    """

    def __init__(self, record: Record, suspect: Callable[[str], bool], rates_changed: Callable[[int], None]) -> None:
        self.watched: WatchedGradient | None = None
        self._record = record
        self._suspect = suspect
        self._rates_changed = rates_changed
        self._rest: LocalRest | None = None
        self._steps: LocalSteps | None = None
        self._averages = self._locals = 0  # backwards at the last step
        self._missed = 0  # steps without a gradient to look at
        self._rates: list[Any] = []  # at the last step, of all groups

    def before_step(self, optimizer: Optimizer, spares: Sequence[WatchedGradient]) -> None:
        """Have the rules look, where this step has what they look at.

        Args:
            optimizer: is about to step.
            spares: gradients that were watched so far, of which it may own some.
        """
        record, watched = self._record, self.watched
        rates = [*map(RATE, optimizer.param_groups)]
        if len(rates) != len(self._rates) or not all(map(is_, rates, self._rates)):
            self._compare(rates)
        if watched is None or watched.param.grad is None:
            self._missed += 1
            if self._missed & (self._missed - 1):  # searching takes time, so it is done at powers of two
                return
            watched = self._choose(optimizer, spares)
        if watched is None or watched.has_stepped or not watched.length:
            return
        assert self._rest is not None
        assert self._steps is not None
        if watched.rest:
            self._rest.before_step(optimizer)
        averaged, local = record.averages != self._averages, record.local_backwards != self._locals
        if self._steps.count or not averaged:
            self._steps.before_step(optimizer, averaged=averaged, local=local)
        self._averages, self._locals = record.averages, record.local_backwards
        watched.has_stepped = True

    def _compare(self, rates: list[Any]) -> None:
        before, self._rates = self._rates, rates
        # Those on a device are not read.
        now, then = ([rate for rate in each if type(rate) is float] for each in (rates, before))
        if before and now != then:
            self._rates_changed(self._record.averages)

    def _choose(self, optimizer: Optimizer, spares: Sequence[WatchedGradient]) -> WatchedGradient | None:
        record, wanted = self._record, {id(param) for group in optimizer.param_groups for param in group["params"]}
        fitting = {name: param for name, param in record.params().items() if id(param) in wanted and fits(param)}
        if not fitting:
            return self.watched
        own = {spare.name: spare for spare in spares if spare.name in fitting}
        best = best_of({name: fitting[name] for name in own or fitting})
        if own:  # a head may be in one loss of several, so the parameter that most backwards have written tells most
            most = max(own[name].length for name, _ in best)
            best = [(name, param) for name, param in best if own[name].length == most]
        name, param = best[-1]
        watched = self.watched = own[name] if own else WatchedGradient(param, name, record.rank)
        self._rest, self._steps = LocalRest(watched, self._suspect), LocalSteps(watched, record)
        self._averages, self._locals = record.averages, record.local_backwards
        return watched


def fits(param: Tensor) -> bool:
    """Whether the gradient of `param` is there, and can be watched: dense, real, and averaged by one wrapper only."""
    grad = param.grad
    if grad is None or not (has_plain_class(param) and has_plain_class(grad)):
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
