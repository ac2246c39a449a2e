"""A hook of a wrapped model that stays with this wrapper: copies and files of it do not have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dpfuse.engine.torch_private import leave_untraced
from dpfuse.trace.traced_model import TracedModel

__all__ = ["WrapperHook"]


class WrapperHook:
    """Calls a function of the trace.

    Args:
        call: gets the model, and what torch passes to the hook.
        traced: the model.
    """

    def __init__(self, call: Callable[..., None], traced: TracedModel) -> None:
        self._call = call
        self._traced = traced

    def __call__(self, *args: Any) -> None:
        self._call(self._traced, *args)

    leave_untraced(__call__, calls=True, reason="a trace of dpfuse reads here what goes in and what comes out")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """Stands for the hook in a copy."""
