"""The rule of DPF-L02: an optimizer makes step after step on gradients of this rank alone."""

from __future__ import annotations

import sys
from types import FrameType
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.events import Watcher
from dpfuse.engine.streams import HostCopy
from dpfuse.loop.coming_backwards import average_may_come
from dpfuse.loop.findings import NOTHING_AVERAGED, findings
from dpfuse.loop.model import Model
from dpfuse.loop.watched_gradient import Sample, WatchedGradient, only_rescaled, rounding_of, sample_of, values_of

__all__ = ["LocalSteps"]

STEPS = 3  # in a row, before it looks closer
LOOKS = 17  # steps for which it does


class LocalSteps(Watcher):
    """Counts steps on local gradients, then looks whether the program averages gradients or weights by itself.

    An average by hand shows in the bits of a gradient between backward and step, or of a weight between steps. Clipping
    does not. Where either is seen, nothing is said from then on.

    Args:
        watched: a gradient of the optimizer.
        model: whose gradients are averaged.
    """

    def __init__(self, watched: WatchedGradient, model: Model) -> None:
        self._watched = watched
        self._model = model
        self._before = model.averages, model.others  # at the last step
        self._optimizer: ref[Optimizer] | None = None
        self._steps = 0
        self._decided = False
        self._looks = False  # whether it looks at gradients and weights
        self._gradients: list[tuple[Sample, Sample]] = []  # behind a backward, and behind the step
        self._weights: list[tuple[Sample, Sample]] = []  # behind a step, and before the next backward
        self._stepped: Sample | None = None  # the weight behind a step, until the next backward
        self._copies: tuple[HostCopy, HostCopy] | None = None

    def before_step(self, optimizer: Optimizer) -> None:
        """Count this step, and say what was found."""
        if self._decided:
            return
        means, others = self._model.averages, self._model.others
        if means != self._before[0]:
            self._start_again()
        elif others != self._before[1] and self._watched.locals:
            self._count(optimizer)
        self._before = means, others

    @property
    def settled(self) -> bool:
        """Whether a step on a mean changes nothing but what `skipped` notes."""
        return self._decided or not (self._looks or self._steps)

    def skipped(self, means: int, others: int) -> None:
        """Note how many backwards there had been at the last of some steps on means, of which it was not told."""
        if not self._decided:
            self._before = means, others

    def after_step(self, optimizer: Optimizer) -> None:
        """Copy some elements of weight and gradient behind the step, which may itself average."""
        own = self._optimizer is not None and self._optimizer() is optimizer
        if not (self._looks and own) or self._stepped is not None:
            return
        param, bits = self._watched.param, self._watched.bits
        if bits is None or param.grad is None:
            if self._gradients:  # else bits are copied from the next backward on
                self._decide()  # what happens here is not known
            return
        self._gradients.append((bits, sample_of(param.grad)))
        self._stepped = sample_of(param)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """Copy the same elements of the weight before the next backward."""
        if self._stepped is not None:
            self._weights.append((self._stepped, sample_of(self._watched.param)))
            self._stepped = None

    def _look(self, optimizer: Optimizer) -> None:
        self._looks, self._optimizer = True, ref(optimizer)
        self._watched.keeps_bits += 1
        self._model.looking.append(self)

    def stop(self) -> None:
        """Look at nothing any more."""
        if self._looks:
            self._decide()

    def _start_again(self) -> None:
        self._steps = 0
        self.stop()  # a program that averages now and then knows what it does

    def _decide(self) -> None:
        if self._looks:
            self._watched.keeps_bits -= 1
            self._model.looking.remove(self)
        self._decided, self._looks = True, False
        self._gradients, self._weights, self._stepped, self._copies = [], [], None, None

    def _count(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._copies is not None:
            kept = self._were_kept(*self._copies)
            self._decide()
            if kept and not self._model.hooked() and not self._may_average(sys._getframe()):
                findings.warn(NOTHING_AVERAGED, self._text(optimizer))
        elif self._steps >= STEPS and not self._looks:
            self._look(optimizer)
        elif self._looks and len(self._weights) >= LOOKS:
            self._copies = self._copy_of(self._gradients), self._copy_of(self._weights)

    def _may_average(self, frame: FrameType) -> bool:
        return self._model.averages_weights(frame) or average_may_come(frame, self._model.made)

    def _copy_of(self, pairs: list[tuple[Sample, Sample]]) -> HostCopy:
        return HostCopy(torch.stack([values_of(sample).double() for pair in pairs for sample in pair]))

    def _were_kept(self, gradients: HostCopy, weights: HostCopy) -> bool:
        tolerance = rounding_of(self._watched.param)
        if not all(only_rescaled(before, now, tolerance) for before, now in pairs_in(gradients)):
            return False
        return all(torch.equal(before, now) for before, now in pairs_in(weights))

    def _text(self, optimizer: Optimizer) -> str:
        rank, name = self._model.rank, type(optimizer).__name__
        return (
            f"rank {rank}: {name} made {self._steps} steps in a row on gradients of this rank alone. No backward was "
            f"synchronised in this time. In the last {LOOKS} of them, other code has at most scaled the gradient of "
            f"{self._watched.name!r} behind backward, and has not changed the weight between steps. "
            "Expected a synchronised backward before a step: leave no_sync(), or set require_backward_grad_sync to "
            "True, before the forward of the last batch. If the ranks are to train apart, pass "
            'check_loop="off" to the wrapper.'
        )


def pairs_in(copy: HostCopy) -> Tensor:
    """Return what was copied, [pairs, 2, elements] float64."""
    numbers = torch.tensor(copy.read(), dtype=torch.float64, device="cpu")
    return numbers.view(-1, 2, numbers.shape[-1])
