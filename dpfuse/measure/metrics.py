"""Numbers of the last synchronised backward, for a log: times, bytes, norm, and the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.comm_buffer import CommBuffer
from dpfuse.engine.feature import Engine, Feature
from dpfuse.engine.plan import Bucket
from dpfuse.engine.protocols import PackStep
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import ReportPlace
from dpfuse.engine.streams import capturing
from dpfuse.gradients.norm import Gradients
from dpfuse.gradients.weight import GradientWeight
from dpfuse.measure.communication_times import CommunicationTimes
from dpfuse.measure.local_squares import LocalSquares, host_knows
from dpfuse.measure.metric_times import MetricTimes

__all__ = ["Metrics", "noise_of"]


PARTS = {"squares": 1, "measured": 1, "nonfinite": 1}  # what ranks add up: squares, ranks that have some, bad values


class _Measured(NamedTuple):
    """One synchronised backward."""

    step: int
    times: CommunicationTimes
    values: Tensor  # the squared norm of the delivered gradients, the sums of PARTS, those of weights; [7] float64
    scale: float  # what averaging multiplies the sum of the ranks with


class Metrics(Feature):
    """Measures every n-th synchronised backward.

    Args:
        every: n; the first backward is measured.
        weight: of this rank's gradients.

    Attributes:
        step_times: of each step.
    """

    _engine: Engine
    _place: ReportPlace

    def __init__(self, every: int, weight: GradientWeight) -> None:
        self.step_times = MetricTimes()
        self._every = every
        self._measures = False  # in the backward that is running
        self._weight = weight
        self._times = CommunicationTimes()
        self._sent: list[tuple[Any, Any]] = []  # sums of squares, and numbers of values that are not finite
        self._report: Report | None = None
        self._last: _Measured | None = None
        self._numbers: dict[str, float] = {}  # of it, once they were read

    def join(self, engine: Engine) -> None:
        self._engine, self._place = engine, engine.layout.register("metrics", PARTS)

    def step(self, order: int, bucket: Bucket, buffer: CommBuffer, report: Report | None) -> PackStep:
        return LocalSquares(self, buffer, report, sparse=bucket.sparse)

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        self._measures = sync and self._engine.completed % self._every == 0
        if self._measures:
            self._times, self._sent = CommunicationTimes(), []

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        if self._measures and not capturing():
            self._times.bucket_sent(tensors, work, is_last=is_last)

    def bucket_waited_for(self, flat: Tensor, work: dist.Work) -> None:
        if self._measures and not capturing():
            self._times.bucket_waited_for(flat, work)

    def bucket_landed(self) -> None:
        if self._measures and not capturing():
            self._times.bucket_landed()

    @property
    def measures(self) -> bool:
        """Whether the backward that is running is measured."""
        return self._measures

    def add(self, squares: Tensor | float, nonfinite: Tensor | float) -> None:
        """Take what some gradients of this rank come to: tensors on a GPU, numbers on a CPU."""
        self._sent.append((squares, nonfinite))

    def tell(self, report: Report, packed: Tensor) -> None:
        """Write the sums of this rank into the report, as it is packed."""
        self._report = report
        weight = self._weight.in_use
        if host_knows(packed):
            total, wrong = (float(sum(numbers)) for numbers in zip(*self._sent, strict=True))
            known = 1.0 if weight is None else float(weight)
            takes_part = known > 0 if weight is not None else not self._engine.without_inputs
            # What is sent is weight times gradient: divided once, the weighted square is left.
            told = [total / known if known > 0 else 0.0, takes_part, wrong]
            report.write(packed, self._place, torch.tensor(told, dtype=torch.float64, device="cpu"))
            return
        squares, nonfinite = (torch.stack(numbers).sum() for numbers in zip(*self._sent, strict=True))
        measured = torch.full_like(squares, not self._engine.without_inputs)
        if weight is not None:
            measured = (weight > 0).double()
            squares = torch.where(weight > 0, squares / weight.double(), 0.0)
        report.write(packed, self._place, torch.stack([squares, measured, nonfinite.to(squares.dtype)]))

    def delivered(self) -> None:
        """As `Watcher.delivered`."""
        engine, report = self._engine, self._report
        if report is None or not self._measures:
            return
        squares = Gradients.delivered(engine.buckets).squares()
        values = torch.cat([squares.view(1), report.sums(self._place).double(), self._weight.sums(report)])
        averaging = engine.buckets[0].averaging
        self._last = _Measured(engine.completed, self._times, values, averaging.pre_scale * averaging.post_scale)
        self._report, self._numbers = None, {}

    def read(self) -> dict[str, float]:
        """Return the numbers of the last synchronised backward; empty before the first. Waits for the device."""
        if self._last is not None and not self._numbers:
            self._numbers = self._computed(self._last)
        return dict(self._numbers)

    def _computed(self, last: _Measured) -> dict[str, float]:
        step, times, values, scale = last
        times.finish()
        square, squares, ranks, nonfinite, weight, _, weighing = values.tolist()
        batch = weight if weighing else ranks
        mean = square if weighing or not ranks else square / (scale * ranks) ** 2
        signal, variance = (
            (math.nan, math.nan) if self._engine.hook is not None else noise_of(squares, mean, ranks, batch)
        )
        return {
            "step": step,
            "exposed_seconds": times.exposed,
            "communication_seconds": times.seconds,
            "bytes_sent": times.nbytes,
            "grad_norm": math.sqrt(square),
            "nonfinite_values": nonfinite,
            "gradient_square": signal,
            "gradient_variance": variance,
            "noise_scale": variance / signal if signal > 0 else math.nan if math.isnan(signal) else math.inf,
        }


def noise_of(squares: float, mean: float, ranks: float, batch: float) -> tuple[float, float]:
    """Estimate the squared norm of the true gradient, and the variance of the gradient of one unit of the batch.

    Args:
        squares: the sum over the ranks of weight times squared norm of the rank's gradient.
        mean: the squared norm of the weighted mean.
        ranks: how many have a weight above 0.
        batch: the sum of the weights.

    Returns:
        Both estimates, without bias; NaN for fewer than two ranks.

    Example:
        >>> noise_of(squares=10.0, mean=4.0, ranks=2, batch=2)
        (3.0, 2.0)

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1.
    """
    if ranks < 2 or not batch > 0:
        return math.nan, math.nan
    local = squares / batch
    return (ranks * mean - local) / (ranks - 1), (local - mean) * batch / (ranks - 1)
