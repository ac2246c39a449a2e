"""The learning rate schedulers of a Model's training: part of the optimizer's file, they go on after a load."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from dpfuse.paddle.serialization import plain

__all__ = ["Schedules"]


class Schedules:
    """The schedulers that a training steps. It owns none of them."""

    def __init__(self) -> None:
        self._used: Sequence[LRScheduler] = ()
        self._loaded: list[dict[str, Any]] = []  # of a file, until a training begins

    def use(self, schedulers: Sequence[LRScheduler]) -> None:
        """Begin a training with these. After a load they go on where those of the file were.

        Warns if the file has schedulers of other types: then these begin as they are.
        """
        loaded, self._loaded, self._used = self._loaded, [], schedulers
        if not loaded or not schedulers:
            return
        got, expected = [each["type"] for each in loaded], [type(each).__name__ for each in schedulers]
        if got != expected:
            warnings.warn(
                f"the loaded optimizer was trained with {', '.join(got)}, expected {', '.join(expected)}, which fit "
                "got: the learning rate follows these from their beginning. Pass reset_optimizer=True to load, if that "
                "is what you want.",
                UserWarning,
                stacklevel=3,
            )
            return
        for each, scheduler in zip(loaded, schedulers, strict=True):
            scheduler.load_state_dict(each["state"])
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def state(self) -> list[dict[str, Any]]:
        """Return what `load` takes: the types and states of the schedulers in use; none if one cannot be saved."""
        if self._loaded:
            return self._loaded
        try:
            return [
                {"type": type(each).__name__, "state": plain(each.state_dict(), f"the state of {type(each).__name__}")}
                for each in self._used
            ]
        except TypeError as error:
            warnings.warn(f"the learning rate schedule is not saved: {error}", UserWarning, stacklevel=2)
            return []

    def load(self, state: list[dict[str, Any]]) -> None:
        """Keep these states for the training that begins next."""
        self._loaded, self._used = state, ()
