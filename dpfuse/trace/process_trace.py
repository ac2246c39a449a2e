"""Starts the trace of this process: the variable DPFUSE_TRACE, the optimizers, and the call that runs a backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps
from dpfuse.trace.tracer import Tracer
from dpfuse.trace_file import VARIABLE

__all__ = ["process_tracer", "start_tracer", "stop_tracer"]

_tracer: Tracer | None = None
_listener: _Listener | None = None
_owner = 0  # the process that has made it: a fork has none
_unwatch: Callable[[], None]  # gives torch its backward back


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
    buffers: bool = False,
    finite: bool = False,
) -> Tracer:
    """Make the tracer of this process, in the place of an earlier one. Arguments and errors are those of `Tracer`."""
    global _tracer, _listener, _owner, _unwatch
    stop_tracer()
    _tracer = Tracer(folder, deep_steps, after_step, sketch=sketch, buffers=buffers, finite=finite)
    _owner = os.getpid()
    _listener = _Listener(_tracer)
    _unwatch = _watch_backwards(_tracer)
    return _tracer


def stop_tracer() -> None:
    """Close the trace of this process, and take its hooks away. Without a tracer it does nothing."""
    global _tracer, _listener
    if _tracer is not None:
        _unwatch()
        _tracer.close()
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


def _watch_backwards(tracer: Tracer) -> Callable[[], None]:
    """Tell the tracer of each call of `torch.autograd.backward`, through which `Tensor.backward` runs.

    Returns:
        A function that ends this.
    """
    plain = torch.autograd.backward
    inside = ended = False

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        if inside or ended:
            plain(tensors, *args, **kwargs)
            return
        inside = True
        try:
            tracer.backward_begins([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
            plain(tensors, *args, **kwargs)
            tracer.backward_ended()
        except BaseException:
            tracer.backward_failed()
            raise
        finally:
            inside = False

    def end() -> None:
        nonlocal ended
        ended = True
        # Where someone else has wrapped it since, theirs stays, and ours below it passes calls on.
        if torch.autograd.backward is backward:
            torch.autograd.backward = plain

    torch.autograd.backward = backward
    return end
