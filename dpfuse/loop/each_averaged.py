"""The rule of DPF-L10: every backward of a window is synchronised, where one for the window would do."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.streams import capturing
from dpfuse.loop.findings import EACH_AVERAGED, findings
from dpfuse.loop.model import Model, Times
from dpfuse.loop.watched_gradient import WatchedGradient

__all__ = ["EachAveraged"]

COUNTED, MEASURED = 8, 8  # steps in a row with as many backwards: before it measures, and while it does
LEAST = 0.05  # of a step, that could be saved


class EachAveraged:
    """Counts synchronised backwards that were added to one gradient, and measures what all except the last one cost.

    A program may need it so: the two backwards of a discriminator can share an average, too, but it is no mistake that
    they do not. So the finding goes to a log.

    Args:
        watched: a gradient of the optimizer.
        model: whose gradients are averaged.
    """

    def __init__(self, watched: WatchedGradient, model: Model) -> None:
        self._watched = watched
        self._model = model
        self._length = 0  # of the last window, if all of it was synchronised
        self._steps = 0  # in a row that had this length
        self._times: _OutsideCaptures | None = None
        self._began = 0.0

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the window that ends with this step."""
        watched = self._watched
        length = 0 if watched.locals else watched.length
        if length != self._length:
            self._length, self._steps = length, 0
            self._stop()
        if length < 2:
            return
        self._steps += 1
        if self._steps == COUNTED:
            times = self._times = _OutsideCaptures(self._model.times())
            self._model.observers.append(times)
            self._began = perf_counter()
        elif self._steps == COUNTED + MEASURED:
            self._say(optimizer)

    def _stop(self) -> Times | None:
        times, self._times = self._times, None
        if times is None:
            return None
        others = [observer for observer in self._model.observers if observer is not times]
        if len(others) == len(self._model.observers):
            return None  # a call of `observe` has dropped it
        self._model.observers[:] = others
        return times.times

    def _say(self, optimizer: Optimizer) -> None:
        elapsed = (perf_counter() - self._began) / MEASURED
        times = self._stop()
        if times is None:
            return
        times.finish()
        share = (self._length - 1) / self._length
        seconds, nbytes = times.exposed / MEASURED * share, times.nbytes / MEASURED * share
        if seconds < LEAST * elapsed:
            return
        name, before = type(optimizer).__name__, self._length - 1
        findings.log(
            EACH_AVERAGED,
            self._model.rank,
            f"rank {self._model.rank}: {self._length} synchronised backwards came before each of {self._steps} steps "
            f"of {name}, and their gradients were added up. With the first {before} inside no_sync(), a step would "
            f"send {nbytes:,.0f} bytes less, and save up to {seconds * 1000:.3g} of {elapsed * 1000:.3g} ms.",
        )


class _OutsideCaptures:
    """Passes on what it is told, except while a CUDA graph is captured.

    Args:
        times: measures how buckets travel.
    """

    def __init__(self, times: Times) -> None:
        self.times = times

    def sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """As `BucketObserver.sent`."""
        if not capturing():
            self.times.sent(tensors, work, is_last=is_last)

    def wait_begins(self, flat: Tensor) -> None:
        """As `BucketObserver.wait_begins`."""
        if not capturing():
            self.times.wait_begins(flat)

    def wait_ends(self) -> None:
        """As `BucketObserver.wait_ends`."""
        if not capturing():
            self.times.wait_ends()
