"""Notes in a trace what a program calls around its steps: zeroing, scaling, clipping, schedules. It judges nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps
from dpfuse.grad_scaler import GradScaler
from dpfuse.trace.trace_file import Call
from dpfuse.trace.tracer import Tracer, params_of

__all__ = ["CallNotes"]

Params = Iterable[Tensor] | None  # that a call is about; None: it is not to be noted
State = tuple[int, int] | None  # of `.grad`: which tensor it is, and how often it was written
SCALER: Any = torch.amp.GradScaler
SCHEDULE: Any = lr_scheduler.LRScheduler
SUM: Any = dist.ReduceOp.SUM if dist.is_available() else None
ALL_REDUCE = "all_reduce"  # the program calls it, and not this file
CLIPS = ("clip_grad_norm_", "clip_grad_value_")


class CallNotes:
    """Hears the calls of this process from now on.

    Args:
        tracer: returns where to note them; None before a model is wrapped.
    """

    def __init__(self, tracer: Callable[[], Tracer | None]) -> None:
        self._tracer = tracer
        self._running: set[Call] = set()
        self._left: dict[int, State] = {}  # by the id of a parameter: as the call before has left its gradient
        self._hear(torch.autograd, "backward", Call.BACKWARD, lambda *_, **__: ())
        self._hear(Optimizer, "zero_grad", Call.ZERO, lambda optimizer, *_, **__: params_of(optimizer))
        self._hear(nn.Module, "zero_grad", Call.ZERO, lambda module, *_, **__: module.parameters())
        self._hear(SCALER, "scale", Call.SCALE, _of_scale)
        self._hear(SCALER, "get_scale", Call.GET_SCALE, lambda *_: ())
        for name in ("unscale_", "step"):
            self._hear(SCALER, name, Call.UNSCALE, _of_unscaling)
        for name in CLIPS:
            self._hear(clip_grad, name, Call.CLIP, _of_clip)
            setattr(nn.utils, name, getattr(clip_grad, name))
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, SCHEDULE) and "step" in vars(kind):
                self._hear(kind, "step", Call.SCHEDULE, _of_schedule)
        if dist.is_available():
            self._hear_all_reduce(ALL_REDUCE)
        call_before_steps(self)
        call_after_steps(self)

    def _hear_all_reduce(self, name: str) -> None:
        """Note that the program itself adds up gradients over all ranks, each or all in one tensor."""
        plain = getattr(dist, name)

        @wraps(plain)
        def heard(tensor: Any, op: Any = SUM, group: Any = None, async_op: bool = False) -> Any:
            tracer = None if torch.compiler.is_compiling() else self._tracer()
            caller = sys._getframe(1).f_globals.get("__name__", "")
            of_all = op in (SUM, dist.ReduceOp.AVG) and group in (None, dist.group.WORLD)
            if tracer is not None and of_all and not caller.startswith(("torch.", "dpfuse.")):
                with tracer.phases.inside("tracing"):
                    for params in tracer.stepped().values():
                        if found := _gradients_in(tensor, params):
                            tracer.note(Call.ALL_REDUCE, found)
            return plain(tensor, op, group, async_op)

        setattr(dist, name, heard)

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`."""
        tracer = self._tracer()
        if tracer is not None:
            self._note(tracer, Call.STEP, params_of(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        tracer = self._tracer()
        if tracer is not None:
            self._left = _states(tracer)

    def _hear(self, owner: Any, name: str, what: Call, about: Callable[..., Params]) -> None:
        """Note a function of torch where no other of its kind calls it, as a chained schedule steps its parts."""
        plain = getattr(owner, name)

        @wraps(plain)
        def heard(*args: Any, **kwargs: Any) -> Any:
            tracer = None if torch.compiler.is_compiling() else self._tracer()
            if tracer is None:
                return plain(*args, **kwargs)
            if what is Call.CLIP and args and isinstance(args[0], Iterator):
                args = ([*args[0]], *args[1:])  # `parameters()` can be read once
            is_outer = what not in self._running
            if is_outer:
                self._note(tracer, what, about(*args, **kwargs))
            self._running.add(what)
            try:
                return plain(*args, **kwargs)
            finally:
                if is_outer:
                    self._running.discard(what)
                with tracer.phases.inside("tracing"):
                    self._left = _states(tracer)

        setattr(owner, name, heard)

    def _note(self, tracer: Tracer, what: Call, params: Params) -> None:
        with tracer.phases.inside("tracing"):
            now = _states(tracer)
            written = {param for param, state in self._left.items() if now.get(param, state) != state}
            if written:
                tracer.note(Call.BY_HAND, written)
            if params is not None:
                tracer.note(what, {id(param) for param in params})


def _states(tracer: Tracer) -> dict[int, State]:
    grads = ((id(param), param.grad) for params in tracer.stepped().values() for param in params)
    return {
        # A tensor of torch.inference_mode() does not count how often it is written.
        param: None if grad is None else (id(grad), 0 if grad.is_inference() else grad._version)
        for param, grad in grads
    }


def _gradients_in(tensor: Tensor, params: Sequence[Tensor]) -> set[int]:
    """Return the ids of parameters whose gradient this tensor is, or of all if it is a flat copy of their gradients."""
    grads = {id(param): param.grad for param in params if param.grad is not None and param.grad.layout is torch.strided}
    own = {key for key, grad in grads.items() if grad.data_ptr() == tensor.data_ptr() and grad.shape == tensor.shape}
    if own or not grads or tensor.ndim != 1 or tensor.numel() != sum(grad.numel() for grad in grads.values()):
        return own
    first = next(iter(grads.values())).flatten()
    is_copy = first.dtype is tensor.dtype and first.device == tensor.device and torch.equal(first, tensor[: len(first)])
    return {*grads} if is_copy else set()


def _of_scale(scaler: Any, *_: Any, **__: Any) -> Params:
    # dpfuse's own scaler unscales in backward. A scale that begins with 1 hardly ever grows in so few steps.
    leaves_scaled = scaler.is_enabled() and not isinstance(scaler, GradScaler) and scaler._init_scale != 1
    return () if leaves_scaled else None


def _of_unscaling(scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Params:
    return params_of(optimizer) if scaler.is_enabled() else None


def _of_clip(parameters: Any, max_norm: Any = None, *_: Any, clip_value: Any = None, **__: Any) -> Params:
    limit = clip_value if max_norm is None else max_norm
    # An infinite limit only measures. A tensor was computed, such as from the scale.
    if not isinstance(limit, (int, float)) or not math.isfinite(limit):
        return None
    return [parameters] if isinstance(parameters, Tensor) else parameters


def _of_schedule(schedule: Any, *_: Any, **__: Any) -> Params:
    # Its constructor makes the first step.
    return None if getattr(schedule, "_is_initial", False) else params_of(schedule.optimizer)
