"""What all rules of one model share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.events import Events

__all__ = ["Model", "Times"]


class Times(Protocol):
    """Measures how buckets travel. The methods are those of `Watcher`."""

    nbytes: int  # of what travels
    exposed: float  # seconds in which backward had nothing left to do but wait

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None: ...
    def bucket_waited_for(self, flat: Tensor) -> None: ...
    def bucket_landed(self) -> None: ...

    def finish(self) -> None:
        """Complete the seconds; waits for the device."""


class Model:
    """A model whose gradients are averaged, as the rules see it.

    Args:
        params: returns its parameters that are averaged, by name.
        rank: of this process.
        events: of the model.
        times: makes what measures.
        on_gpu: whether the parameters are on a GPU.

    Attributes:
        averages: how many backwards were synchronised so far.
        others: how many were not, and went through an output of the wrapper.
        due: whether words travel with the next synchronised backward.
    """

    def __init__(
        self,
        params: Callable[[], Mapping[str, Tensor]],
        rank: int,
        events: Events,
        times: Callable[[], Times],
        *,
        on_gpu: bool,
    ) -> None:
        self.params = params
        self.rank = rank
        self.events = events
        self.times = times
        self.on_gpu = on_gpu
        self.averages = self.others = 0
        self.due = False
