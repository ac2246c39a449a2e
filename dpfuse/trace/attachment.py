"""Starts the trace of this process: the variable DPFUSE_TRACE, the optimizers, and the call that runs a backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps
from dpfuse.trace.tracer import Tracer

__all__ = ["VARIABLE", "process_tracer", "start_tracer", "stop_tracer"]

VARIABLE = "DPFUSE_TRACE"

_tracer: Tracer | None = None
_listener: _Listener | None = None
_owner = 0  # the process that has made it: a fork has none


def process_tracer() -> Tracer:
    """Return the tracer of this process, which the variable asks for. The first call makes it, in a process group.

    Raises:
        DPFuseError: the folder cannot be used.
    """
    if _tracer is None or _owner != os.getpid():
        return start_tracer(Path(os.environ[VARIABLE]).absolute())
    return _tracer


def start_tracer(
    folder: Path,
    deep_steps: int | None = None,
    after_step: Callable[[int], None] | None = None,
    *,
    sketch: bool = False,
) -> Tracer:
    """Make the tracer of this process. Arguments and errors are those of `Tracer`."""
    global _tracer, _listener, _owner
    _tracer, _owner = Tracer(folder, deep_steps, after_step, sketch=sketch), os.getpid()
    _listener = _Listener(_tracer)
    _watch_backwards()
    return _tracer


def stop_tracer() -> None:
    """Write nothing more in this process, until `start_tracer` is called again."""
    global _tracer, _listener
    _tracer = _listener = None


class _Listener:
    """Is told of the steps of optimizers. It is not the tracer itself, which wrapped models keep alive.

    Args:
        tracer: is told in turn.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.before_step = tracer.before_step
        self.after_step = tracer.after_step
        call_before_steps(self)
        call_after_steps(self)


@cache  # once in a process
def _watch_backwards() -> None:
    """Tell the tracer of each call of `torch.autograd.backward`, through which `Tensor.backward` runs."""
    plain = torch.autograd.backward
    inside = False

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        tracer = _tracer
        if tracer is None or inside:
            plain(tensors, *args, **kwargs)
            return
        inside = True
        try:
            tracer.backward_begins([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
            plain(tensors, *args, **kwargs)
            tracer.backward_ended()
        finally:
            inside = False

    torch.autograd.backward = backward
