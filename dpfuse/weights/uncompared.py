"""Wrappers that compare no weights, since their users have said that weights may differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import Tensor

from dpfuse.engine.autograd import ReadyHooks, hooks_on

__all__ = ["are_uncompared", "compare_none"]

# Known by their hooks, not by their parameters: torch refuses to swap a tensor that has a weak reference.
_uncompared: WeakSet[ReadyHooks] = WeakSet()


def compare_none(hooks: ReadyHooks) -> None:
    """Note the hooks of a wrapper that compares no weights."""
    _uncompared.add(hooks)


def are_uncompared(params: Iterable[Tensor]) -> bool:
    """Whether such a wrapper averages one of these parameters."""
    return any(hooks in _uncompared for param in params for hooks in hooks_on(param))
