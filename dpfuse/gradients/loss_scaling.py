"""Whether a model's gradients still carry the loss scale of a `GradScaler`. Knows no bucket and no optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dpfuse.engine.torch_private import leave_untraced
from dpfuse.errors import DPFuseError

if TYPE_CHECKING:
    from dpfuse.gradients.norm import Gradients

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

    A window goes from one update of the scale to the next, and has one scale. A synchronised backward unscales while
    it packs; what is accumulated on top of it gets the scale back first, so that a window may have several of them.

    Attributes:
        found: of gradients that are unscaled, 1.0 if some rank met NaN or infinite ones, else 0.0, [] float32; None
            while they are scaled.
        ids: of the parameters whose gradients are averaged.
        holders: ids of optimizers that have asked for unscaled gradients and have not used them yet.
    """

    def __init__(self) -> None:
        self.found: Tensor | None = None
        self.ids: frozenset[int] = frozenset()
        self.holders: set[int] = set()
        self._reached: _Reached | None = None
        self._window: object = None

    def reached(self, scale: Tensor, window: object) -> None:
        """The backward that is running comes by a loss that was multiplied with `scale`, [] float32, in this window."""
        running = _Running()
        torch.autograd.Variable._execution_engine.queue_callback(running)
        self._reached = _Reached(weakref.ref(running), scale, window)

    def begins(self, gradients: Callable[[], Gradients], *, announced: bool) -> Tensor | None:
        """A backward reaches the model: the scale of its loss, or None if that has none.

        Args:
            gradients: gives all that are there before it.
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
        if self.found is not None and reached.window is self._window:
            if self.holders or not announced:
                why = "unscale_() was called" if self.holders else "it went through no output of the wrapped model"
                raise DPFuseError(
                    "a backward of a scaled loss accumulates into gradients that a synchronised backward has unscaled, "
                    f"and {why}; expected one synchronised backward for each step, the others inside no_sync(), or "
                    "unscale_() after the last of them and losses of the wrapped model's outputs."
                )
            gradients().multiply(reached.scale)
        self.found = None
        self._window = reached.window
        return reached.scale

    def unscaled(self, found: Tensor) -> None:
        """A backward has ended after which gradients carry no scale; `found` as the attribute."""
        self.found = found
