"""Records when buckets are sent in real backwards, besides what the tuner records."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.time_marks import Moment, now, seconds_between
from dpfuse.tune.recorder import BackwardRecorder

__all__ = ["SendRecorder"]


class SendRecorder(BackwardRecorder):
    """Records backwards, all of which synchronise, and when their buckets are sent."""

    def __init__(self, count: int, *, device: torch.device) -> None:
        super().__init__(count, device=device)
        self._sends: list[list[Moment]] = []  # by backward: its begin, then when each bucket was sent

    def restart(self, count: int, *, skip: int = 0) -> None:
        """As `BackwardRecorder.restart`."""
        super().restart(count, skip=skip)
        self._sends.clear()

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """Record the begin of a backward."""
        super().backward_begins(sync=sync, announced=announced)
        self._sends.append([now(self._device)])

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """Record that a bucket was sent."""
        self._sends[-1].append(now(self._device))

    def sent(self) -> list[float]:
        """Return the typical seconds from the begin of backward until each bucket is sent, in that order."""
        seconds = [[seconds_between(begin, sent) for sent in stamps] for begin, *stamps in self._sends]
        return [median(times) for times in zip(*seconds, strict=True)]
