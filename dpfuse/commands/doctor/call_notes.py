"""Notes in a trace what a program calls around its steps: zeroing, scaling, clipping, schedules. It judges nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from dpfuse.commands.doctor.gradient_state import write_count
from dpfuse.commands.doctor.means_by_hand import MeansByHand
from dpfuse.commands.doctor.replaced_function import replace
from dpfuse.engine.optimizer_step_hook import call_after_steps, call_before_steps
from dpfuse.grad_scaler import GradScaler
from dpfuse.trace.traced_optimizers import params_of
from dpfuse.trace.tracer import Tracer
from dpfuse.trace_file import Call

__all__ = ["CallNotes"]

Params = Iterable[Tensor] | None  # that a call is about; None: it is not to be noted
State = tuple[int, int] | None  # of `.grad`: which tensor it is, and how often it was written
SCALER: Any = torch.amp.GradScaler
SCHEDULE: Any = lr_scheduler.LRScheduler
CLIPS = ("clip_grad_norm_", "clip_grad_value_")


class CallNotes:
    """Hears the calls of this process from now on.

    Args:
        tracer: returns where to note them; None before a model is wrapped.
    """

    def __init__(self, tracer: Callable[[], Tracer | None]) -> None:
        self._tracer = tracer
        self._running: set[Call] = set()
        self._means = MeansByHand(tracer)
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
        call_before_steps(self)
        call_after_steps(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`."""
        tracer = self._tracer()
        if tracer is not None:
            self._means.hear_fused()
            self._note(tracer, Call.STEP, params_of(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        tracer = self._tracer()
        if tracer is not None:
            self._left = _states(tracer)

    def _hear(self, owner: Any, name: str, what: Call, about: Callable[..., Params]) -> None:
        replace(owner, name, partial(self._called, what, about))

    def _called(self, what: Call, about: Callable[..., Params], plain: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Note a function of torch where no other of its kind calls it, as a chained schedule steps its parts."""
        tracer = None if torch.compiler.is_compiling() else self._tracer()
        if tracer is None:
            return plain(*args, **kwargs)
        if what is Call.CLIP:  # `parameters()` can be read once
            if args and isinstance(args[0], Iterator):
                args = ([*args[0]], *args[1:])
            elif isinstance(kwargs.get("parameters"), Iterator):
                kwargs["parameters"] = [*kwargs["parameters"]]
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

    def _note(self, tracer: Tracer, what: Call, params: Params) -> None:
        with tracer.phases.inside("tracing"):
            self._means.settle(tracer)
            now = _states(tracer)
            written = {param for param, state in self._left.items() if now.get(param, state) != state}
            if written:
                tracer.note(Call.BY_HAND, written)
            if params is not None:
                tracer.note(what, {id(param) for param in params})


def _states(tracer: Tracer) -> dict[int, State]:
    grads = ((id(param), param.grad) for params in tracer.stepped().values() for param in params)
    return {param: None if grad is None else (id(grad), write_count(grad)) for param, grad in grads}


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
