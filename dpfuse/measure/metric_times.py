"""How long forward, backward and communication of a step take, by the host's clock. Knows no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.events import Inputs, Watcher

__all__ = ["MetricTimes"]

NAMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


class MetricTimes(Watcher):
    """Times each synchronised backward on a CPU, and the forward before it.

    The four times are those of torch's DDP logging data: from the begin of the forward to that of backward, from there
    to its last gradient, from the first bucket sent to the last one landed, and how much of this backward computed.
    On a GPU, the host's clock does not tell when something ran, and nothing is timed.
    """

    def __init__(self) -> None:
        self._forward = self._backward = self._computed = self._first = self._last = 0  # ns; 0: not yet
        self._latest: tuple[int, ...] = ()
        self._totals = [0] * len(NAMES)
        self._count = 0

    def forward_begins(self, inputs: Inputs) -> None:
        self._forward = perf_counter_ns()

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        self._backward, self._computed, self._first = perf_counter_ns(), 0, 0

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        self._first = self._first or (0 if tensors[0].is_cuda else perf_counter_ns())

    def bucket_waited_for(self, flat: Tensor, work: dist.Work) -> None:
        self._computed = self._computed or perf_counter_ns()

    def bucket_landed(self) -> None:
        self._last = perf_counter_ns()

    def delivered(self) -> None:
        if not (self._forward and self._first):
            return
        self._latest = (
            self._backward - self._forward,
            self._computed - self._backward,
            self._last - self._first,
            self._computed - self._first,
        )
        self._totals = [total + time for total, time in zip(self._totals, self._latest, strict=True)]
        self._count += 1

    def read(self) -> dict[str, int]:
        """Return the four times of the last step, and their means over all steps, in nanoseconds; empty before it."""
        latest = dict(zip(NAMES, self._latest, strict=bool(self._latest)))
        return latest | {
            f"avg_{name}": total // self._count for name, total in zip(latest, self._totals, strict=bool(latest))
        }
