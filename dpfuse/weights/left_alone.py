"""Wrappers whose users have said that weights may differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import Tensor

from dpfuse.engine.autograd import ReadyHooks, hooks_on

__all__ = ["are_left_alone", "leave_alone"]

# Known by their hooks, not by their parameters: torch refuses to swap a tensor that has a weak reference.
_left_alone: WeakSet[ReadyHooks] = WeakSet()


def leave_alone(hooks: ReadyHooks) -> None:
    """Note the hooks of a wrapper that compares no weights."""
    _left_alone.add(hooks)


def are_left_alone(params: Iterable[Tensor]) -> bool:
    """Whether such a wrapper averages one of these parameters."""
    return any(hooks in _left_alone for param in params for hooks in hooks_on(param))
