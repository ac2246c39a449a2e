"""What is known of one optimizer: which of its gradients is watched, and the rules that look at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.autograd import hooks_on
from dpfuse.findings import findings
from dpfuse.loop.local_rest import LocalRest
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.loop.watched_gradient import WatchedGradient, has_plain_class
from dpfuse.loop.weights_at_exit import WeightsAtExit
from dpfuse.rules.codes import NOTHING_AVERAGED
from dpfuse.rules.l02_nothing_averaged import STEPS, note, text_of

__all__ = ["RATE", "SteppingOptimizer", "best_of"]

RATE = methodcaller("get", "lr")  # of a group
SMALL = 8  # elements, of which fewer can hardly tell how they have changed


class SteppingOptimizer:
    """Chooses the gradient of one optimizer, and has the rules look at it.

    The journal reads and writes the attributes where a step has nothing that a rule looks at.

    Args:
        record: of the model whose gradients are averaged.
        suspect: has the ranks compare their weights; see `LocalRest`.
        rates_changed: called with the number of averages where a learning rate is another one than at the last step.

    Attributes:
        watched: the gradient; None if the optimizer has none of the model.
        averages, locals: how many backwards there were at the last step that were synchronised, and that were not.
        rates: the learning rates of all groups at the last step.
        local_steps: how many steps in a row have used local gradients.
    """

    def __init__(
        self, record: TrainingRecord, suspect: Callable[[str], bool], rates_changed: Callable[[int], None]
    ) -> None:
        self.watched: WatchedGradient | None = None
        self._record = record
        self._suspect = suspect
        self._rates_changed = rates_changed
        self._rest: LocalRest | None = None
        self._never: WeightsAtExit | None = None  # while no gradient of the model was averaged
        self.averages = self.locals = self.local_steps = 0
        self.rates: list[Any] = []
        self._missed = 0  # steps without a gradient to look at

    def before_step(self, optimizer: Optimizer, spares: Sequence[WatchedGradient]) -> None:
        """Have the rules look, where this step has what they look at.

        Args:
            optimizer: is about to step.
            spares: gradients that were watched so far, of which it may own some.
        """
        record, watched = self._record, self.watched
        rates = [*map(RATE, optimizer.param_groups)]
        if len(rates) != len(self.rates) or not all(map(is_, rates, self.rates)):
            self.note_rates(rates)
        if watched is not None and watched.averages != record.averages:
            watched.mean_ends(record.averages)
        if watched is None or watched.param.grad is None:
            self._missed += 1
            if self._missed & (self._missed - 1):  # searching takes time, so it is done at powers of two
                return
            watched = self._choose(optimizer, spares)
        if watched is None or watched.has_stepped or not watched.length:
            return
        if watched.rest and self._rest is not None:
            self._rest.before_step(optimizer)
        if self.local_steps or record.averages == self.averages:
            self.count_local(watched, type(optimizer).__name__)
        self.averages, self.locals = record.averages, record.local_backwards
        watched.has_stepped = True

    def count_local(self, watched: WatchedGradient, optimizer: str) -> None:
        """Count a step that may be on local gradients, and say what was found of steps in a row."""
        record, before = self._record, self.local_steps
        averaged = record.averages != self.averages
        local = record.local_backwards != self.locals and watched.locals > 0
        count = self.local_steps = note(before, averaged=averaged, local=local)
        if averaged and self._never is not None:
            self._never.stop()
            self._never = None
        if count <= before:
            return
        if count == 1 and not record.averages and record.group.size() > 1 and dist.is_initialized():
            self._never = WeightsAtExit(watched, record, optimizer)
        if self._never is not None and not self._never.before_step(count):
            self._never = None
        if count == STEPS:
            findings.note(NOTHING_AVERAGED, record.rank, text_of(record.rank, STEPS, optimizer))
            if self._never is not None:
                self._never.compare_at_exit()

    def note_rates(self, rates: list[Any]) -> None:
        """Note learning rates that are not the same objects as those of the last step."""
        before, self.rates = self.rates, rates
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
        self._rest, self._never, self.local_steps = LocalRest(watched, self._suspect), None, 0
        watched.averages = self.averages = record.averages
        self.locals = record.local_backwards
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
    large = [(name, param) for name, param in params.items() if param.numel() >= SMALL]
    return [(name, param) for name, param in large if param.ndim > 1] or large or list(params.items())
