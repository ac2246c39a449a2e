"""The rule of DPF-L10: every backward of a window is synchronised, where one for the window would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.events import Watcher
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
        self._times: _FewBackwards | None = None
        self._began = 0.0

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the window that ends with this step."""
        watched = self._watched
        length = 0 if watched.locals else watched.length
        if length != self._length:
            self._length, self._steps = length, 0
            self.stop()
        if length < 2:
            return
        self._steps += 1
        if self._steps == COUNTED:
            times = self._times = _FewBackwards(self._model.times(), MEASURED * length)
            self._model.events.add(times)
            self._began = perf_counter()
        elif self._steps == COUNTED + MEASURED:
            self._say(optimizer)

    @property
    def settled(self) -> bool:
        """Whether another window of the same backwards changes nothing."""
        return self._length < 2

    def stop(self) -> None:
        """Measure no more."""
        if self._times is not None:
            self._model.events.remove(self._times)
            self._times = None

    def _say(self, optimizer: Optimizer) -> None:
        elapsed = (perf_counter() - self._began) / MEASURED
        measured = self._times
        self.stop()
        assert measured is not None
        if measured.error is not None:
            raise measured.error
        times = measured.times
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


class _FewBackwards(Watcher):
    """Passes on what it is told of some backwards, except while a CUDA graph is captured.

    The program may never make the step behind them, and what is noted of a backward on a GPU takes memory.

    Args:
        times: measures how buckets travel.
        count: synchronised backwards, of which it is told.

    Attributes:
        times: as above; None once it has been told of more, or has failed.
        error: with which it has failed, in the middle of a backward that must go on.
    """

    def __init__(self, times: Times, count: int) -> None:
        self.times: Times | None = times
        self.error: Exception | None = None
        self._left = count

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """As `Watcher.bucket_sent`."""
        if self._left == 0:
            self.times = None
        self._left -= is_last
        self._pass_on(lambda times: times.bucket_sent(tensors, work, is_last=is_last))

    def bucket_waited_for(self, flat: Tensor) -> None:
        """As `Watcher.bucket_waited_for`."""
        self._pass_on(lambda times: times.bucket_waited_for(flat))

    def bucket_landed(self) -> None:
        """As `Watcher.bucket_landed`."""
        self._pass_on(lambda times: times.bucket_landed())

    def _pass_on(self, call: Callable[[Times], None]) -> None:
        if self.times is None or capturing():
            return
        try:
            call(self.times)
        except Exception as error:
            self.times, self.error = None, error
