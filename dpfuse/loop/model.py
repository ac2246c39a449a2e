"""What all rules of one model share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from dpfuse.engine.events import Events, Watcher
from dpfuse.engine.user_line import Place
from dpfuse.loop.coming_averages import weights_may_be_averaged
from dpfuse.loop.coming_code import Lines

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
        hooked: returns whether one of them has a hook of the program.
        rank: of this process.
        events: of the model.
        times: makes what measures.
        made: the lines of the program that ran when it was wrapped, as of `running_lines`.
        on_gpu: whether the parameters are on a GPU.

    Attributes:
        averages: how many backwards were synchronised so far.
        others: how many were not, and went through an output of the wrapper.
        due: whether words travel with the next synchronised backward.
        looking: what is to be told of each backward, and of the end of each step.
        keeps_places: how many rules want to know the place of the forward.
        forward_place: where the user's code was in the last forward, if one of them does.
    """

    def __init__(
        self,
        params: Callable[[], Mapping[str, Tensor]],
        hooked: Callable[[], bool],
        rank: int,
        events: Events,
        times: Callable[[], Times],
        made: Lines,
        *,
        on_gpu: bool,
    ) -> None:
        self.params = params
        self.hooked = hooked
        self.rank = rank
        self.events = events
        self.times = times
        self.made = made
        self.on_gpu = on_gpu
        self.averages = self.others = 0
        self.due = False
        self.looking: list[Watcher] = []
        self.keeps_places = 0
        self.forward_place: Place = ()
        self._averages_weights = False

    def averages_weights(self, frame: FrameType | None) -> bool:
        """Whether the program may average weights by itself, as of `weights_may_be_averaged`.

        Once it may, that holds: a program that makes an optimizer for each round is not read in each.

        Args:
            frame: of a step.
        """
        self._averages_weights = self._averages_weights or weights_may_be_averaged(frame, self.made)
        return self._averages_weights
