"""Warns, once, of another wrapper beside or around one that averages the same gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from weakref import WeakSet, ref

from torch import nn

from dpfuse.engine.autograd import ReadyHooks, hooks_on
from dpfuse.engine.events import Inputs, Watcher
from dpfuse.engine.local_part import leaf_of
from dpfuse.engine.sync import GradSync
from dpfuse.engine.user_line import warn_at_user

__all__ = ["look_for_other_wrappers"]

FORWARD = nn.parallel.DistributedDataParallel.forward.__code__

_told: WeakSet[ReadyHooks] = WeakSet()  # of wrappers of which the user has heard


def look_for_other_wrappers(grads: GradSync, *, told: bool) -> None:
    """Look in the first forward of a wrapper, when a program has deleted the one before.

    Args:
        grads: of the wrapper.
        told: whether the user has been told already that the module is wrapped twice.
    """
    if told:
        _told.add(grads.hooks)
    grads.events.add(_FirstForward(grads))


class _FirstForward(Watcher):
    """Hears it, and nothing after it. Models that share some parameters, such as an encoder, are not meant."""

    def __init__(self, grads: GradSync) -> None:
        self._grads = ref(grads)

    def forward_begins(self, inputs: Inputs) -> None:
        """As `Watcher.forward_begins`."""
        grads = self._grads()
        assert grads is not None
        grads.events.remove(self)
        params, own = [*map(leaf_of, grads.params)], grads.hooks
        if {*map(id, params)} <= {id(param) for around in _running() for param in around.parameters()}:
            warn_at_user(
                "the module is wrapped twice: torch's DistributedDataParallel is around this wrapper; expected one of "
                "the two. Each gradient is averaged by both, which takes twice the time. Do not wrap by hand if a "
                "library such as accelerate wraps the model."
            )
        if own not in _told and (others := set.intersection(*({*hooks_on(param)} for param in params)) - {own, *_told}):
            _told.update({own, *others})
            warn_at_user(
                f"the {len(params)} parameters of this module belong to two wrappers; expected one. Each has "
                "buffers of its own, into which all gradients are copied. Go on with the first wrapper, or delete it "
                "before the forward of the other."
            )


def _running() -> Iterator[nn.Module]:
    """Yield the modules of torch's class whose forward runs in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is FORWARD:
            yield frame.f_locals["self"]
        frame = frame.f_back
