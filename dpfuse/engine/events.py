"""The events of a training: what a watcher may hear, and the methods that the engine calls for each event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps

__all__ = ["Events", "Inputs", "Watcher", "hear_steps", "overridden"]

Inputs = tuple[Sequence[Any], Mapping[str, Any]]  # the arguments of a forward


class Watcher:
    """Hears a training. An event costs nothing if its method is not overridden, or if it is unheard.

    Attributes:
        unheard: names of events of which it is not told now. `Events.refresh` is to be called where they change.

    Example:
        >>> class Count(Watcher):
        ...     averaged = 0
        ...     def delivered(self):
        ...         self.averaged += 1
        >>> count = Count()
        >>> events = Events([count])
        >>> for tell in events.delivered:
        ...     tell()
        >>> count.averaged, events.bucket_sent
        (1, ())
    """

    unheard: Collection[str] = ()

    def forward_begins(self, inputs: Inputs) -> None:
        """A forward begins that may have a backward, outside of any."""

    def backward_begins(self, *, sync: bool, announced: bool) -> None:
        """A backward begins. An error raised here comes before anything is sent.

        Args:
            sync: whether it is synchronised.
            announced: whether an output of the wrapper has told that it begins.
        """

    def thawed(self, params: Sequence[Tensor]) -> None:
        """These parameters were frozen, and require gradients from the backward on that begins now."""

    def bucket_sent(self, tensors: Sequence[Tensor], work: dist.Work, *, is_last: bool) -> None:
        """These tensors were given to the process group."""

    def bucket_waited_for(self, flat: Tensor, work: dist.Work) -> None:
        """Backward has ended, and waits for a bucket."""

    def bucket_landed(self) -> None:
        """That bucket has landed."""

    def backward_ended(self) -> None:
        """The outermost backward has ended. What is left of a synchronised one is sent next."""

    def local_backward_ended(self, *, added: bool) -> None:
        """A backward has ended without averaging. `added` tells whether it has added to gradients."""

    def delivered(self) -> None:
        """All gradients of a synchronised backward are delivered."""

    def backward_failed(self) -> None:
        """A backward has raised, maybe of another model; or what the peers wait for since then is completed."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; not only one of this model. An error raised here keeps it from stepping."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. The weights are changed already, so only a broken device is an error here."""


def overridden(base: type, name: str, *parts: Any) -> tuple[Callable[..., Any], ...]:
    """Return the method `name` of those parts whose classes override that of `base`."""
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(base, name))


class Events:
    """For each event the methods to call, in the order of the watchers. They are found when watchers come or go.

    Args:
        watchers: the objects that hear.
    """

    forward_begins: tuple[Callable[[Inputs], None], ...]
    backward_begins: tuple[Callable[..., None], ...]
    thawed: tuple[Callable[[Sequence[Tensor]], None], ...]
    bucket_sent: tuple[Callable[..., None], ...]
    bucket_waited_for: tuple[Callable[[Tensor, dist.Work], None], ...]
    bucket_landed: tuple[Callable[[], None], ...]
    backward_ended: tuple[Callable[[], None], ...]
    local_backward_ended: tuple[Callable[..., None], ...]
    delivered: tuple[Callable[[], None], ...]
    backward_failed: tuple[Callable[[], None], ...]

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        self._watchers = list(watchers)
        self.refresh()

    def add(self, watcher: Watcher, *, first: bool = False) -> None:
        """Tell this watcher, too: before or after the others."""
        self._watchers.insert(0 if first else len(self._watchers), watcher)
        self.refresh()
        hear_steps(watcher)

    def remove(self, watcher: Watcher) -> None:
        """Tell this watcher of no event inside forwards and backwards any more."""
        self._watchers = [each for each in self._watchers if each is not watcher]
        self.refresh()

    def exchange(self, before: Watcher | None, now: Watcher | None) -> None:
        """Tell `now` in place of `before`, after the others."""
        if before is not None:
            self.remove(before)
        if now is not None:
            self.add(now)

    def hear_steps(self) -> None:
        """Tell all watchers of the steps of optimizers, as long as something keeps them alive."""
        for watcher in self._watchers:
            hear_steps(watcher)

    def refresh(self) -> None:
        """Find the methods again, since a watcher is to hear other events."""
        for name in Events.__annotations__:
            hearing = [watcher for watcher in self._watchers if name not in watcher.unheard]
            setattr(self, name, overridden(Watcher, name, *hearing))


def hear_steps(watcher: Watcher) -> None:
    """Tell a watcher of the steps of all optimizers, as long as something keeps it alive."""
    if overridden(Watcher, "before_step", watcher):
        call_before_steps(watcher)
    if overridden(Watcher, "after_step", watcher):
        call_after_steps(watcher)
