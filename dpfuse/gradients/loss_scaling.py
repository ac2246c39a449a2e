"""Whether a model's gradients still carry the loss scale of a `GradScaler`. Knows no bucket and no optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import Tensor

from dpfuse.engine.shared_params import shared
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.errors import DPFuseError

__all__ = ["LossScale"]


class _Running:
    """The engine holds it as a callback while a backward lives, and calls it at its end, unless that is an error."""

    ended = False

    def __call__(self) -> None:
        self.ended = True

    leave_untraced(__call__, calls=True)


class _Reached(NamedTuple):
    """A backward has begun at a scaled loss."""

    backward: weakref.ref[_Running]
    scale: Tensor
    window: object


class LossScale:
    """What the gradients of one wrapped model were multiplied with.

    A window goes from one update of the scale to the next, and has one scale. A synchronised backward unscales what it
    delivers while it packs. A later backward of the window adds to that, so the gradients get the scale back first. A
    parameter that is frozen then takes no part, and its gradient stays unscaled.

    Attributes:
        unscaled: ids of the parameters whose gradients were unscaled in this window, and carry no scale since.
        fresh: those of them that the last synchronised backward has delivered.
        found: whether some rank met NaN or infinite values in the fresh ones: 1.0 or 0.0, [] float32; None before the
            first.
        holders: for each optimizer, by id, that has asked for unscaled gradients and not used them yet: the ids of its
            parameters.
    """

    def __init__(self) -> None:
        self.unscaled: frozenset[int] = frozenset()
        self.fresh: frozenset[int] = frozenset()
        self.found: Tensor | None = None
        self.holders: dict[int, Set[int]] = {}
        self._reached: _Reached | None = None
        self._window: object = None
        _living.add(self)

    def reached(self, scale: Tensor, window: object) -> None:
        """The backward that is running comes by a loss that was multiplied with `scale`, [] float32, in this window."""
        running = _Running()
        torch.autograd.Variable._execution_engine.queue_callback(running)
        self._reached = _Reached(weakref.ref(running), scale, window)

    def begins(
        self, trained: Callable[[], Set[int]], multiply: Callable[[Set[int], Tensor], None], *, announced: bool
    ) -> Tensor | None:
        """A backward reaches the model: the scale of its loss, or None if that has none.

        Args:
            trained: gives the ids of the parameters that are not frozen.
            multiply: multiplies the gradients that the parameters with these ids have before the backward.
            announced: by an output of the wrapper, so that nothing has accumulated yet.

        Raises:
            DPFuseError: unscaled gradients are there, and it is too late to scale them again.
        """
        reached = self._reached
        # A loss that was not this model's may have been reached before, or torch.autograd.grad was called. But a
        # checkpoint around the model has it run in a backward of its own, and maybe several times.
        running = None if reached is None else reached.backward()
        if reached is None or running is None or running.ended:
            self._reached = None
            return None
        if reached.window is not self._window:
            self.forget()
            self._window = reached.window
        scales = [self]
        if shared:  # another model of this window may have unscaled a part that both have
            scales += [one for one in tuple(_living) if one is not self and one._window is self._window]
        unscaled = frozenset[int]().union(*(one.unscaled for one in scales))
        joined = unscaled & trained() if unscaled else unscaled
        if joined:
            asked = any(not joined.isdisjoint(ids) for one in scales for ids in one.holders.values())
            if asked or not announced:
                why = "unscale_() was called" if asked else "it went through no output of the wrapped model"
                raise DPFuseError(
                    "a backward of a scaled loss accumulates into gradients that a synchronised backward has unscaled, "
                    f"and {why}; expected one synchronised backward for each step, the others inside no_sync(), or "
                    "unscale_() after the last of them and losses of the wrapped model's outputs."
                )
            multiply(joined, reached.scale)
            for one in scales:
                one.unscaled, one.fresh = one.unscaled - joined, one.fresh - joined
        return reached.scale

    def delivered(self, ids: frozenset[int], found: Tensor, *, unscaled: bool) -> None:
        """A synchronised backward has delivered the gradients of these parameters.

        Args:
            ids: of the parameters.
            found: as the attribute.
            unscaled: whether packing has unscaled them. If not, those that carried no scale still carry none.
        """
        if unscaled:
            self.unscaled |= ids
        for one in tuple(_living) if shared else ():
            if one is not self:
                one.unscaled, one.fresh = one.unscaled - ids, one.fresh - ids
        self.fresh = ids & self.unscaled
        self.found = found

    def forget(self) -> None:
        """Take no gradient for an unscaled one."""
        self.unscaled = self.fresh = frozenset()
        self.found = None


_living: weakref.WeakSet[LossScale] = weakref.WeakSet()
