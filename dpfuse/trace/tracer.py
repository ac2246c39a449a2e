"""Writes a line after each optimizer step: what a rank has computed. Works for torch's wrapper and for ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.random_states import hashes_of_random_state
from dpfuse.engine.tensor_hash import hash_of, hash_of_all
from dpfuse.engine.user_line import user_line
from dpfuse.trace.finite import FiniteLook
from dpfuse.trace.json_line import as_json
from dpfuse.trace.settings import process_settings
from dpfuse.trace.step_hashes import StepHashes
from dpfuse.trace.step_phases import StepPhases
from dpfuse.trace.traced_model import TracedModel, inside
from dpfuse.trace.traced_optimizers import TracedOptimizers, params_of, settings_of
from dpfuse.trace.wrapper_hook import WrapperHook
from dpfuse.trace_file import AVERAGED, CALLS, Call, Writer

__all__ = ["Tracer"]


class Tracer:
    """Writes the trace of this rank.

    Args:
        folder: for the file.
        deep_steps: how many steps of an optimizer have hashes of gradients and of buffers, and of each parameter; the
            others have one number for all parameters. None: all.
        after_step: called after each line, with the number of steps of that optimizer.
        sketch: write a sum of each gradient with fixed random signs, too, from which the distance of two runs follows.
        buffers: hash each buffer after a backward that averages, too, in the steps with all hashes.
        finite: note which gradients and weights are NaN or infinite, too.

    Raises:
        DPFuseError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        deep_steps: int | None = None,
        after_step: Callable[[int], None] | None = None,
        *,
        sketch: bool = False,
        buffers: bool = False,
        finite: bool = False,
    ) -> None:
        self.phases = StepPhases()
        self.evaluated: dict[str, int] = {}  # by the line: calls of models without gradients, or in eval mode
        self._deep = deep_steps is None or deep_steps > 0
        self._deep_steps = math.inf if deep_steps is None else deep_steps
        self._after_step = after_step
        self._buffers = buffers
        self._finite = FiniteLook() if finite else None
        self._hashes = StepHashes(sketch=sketch)
        self._models: list[TracedModel] = []
        self._hooks: list[RemovableHandle] = []  # of their wrappers
        self._running: dict[str, Any] = {}  # the backward that runs, or has ended last
        self._in_step = False  # whether an optimizer steps just now
        self._lines = 0
        self._begin_line()
        self._file = Writer(folder, dist.get_rank())
        self._optimizers = TracedOptimizers(self._file)
        self._file.write("settings", {**process_settings(), "random": hashes_of_random_state()})

    def _begin_line(self) -> None:
        self._line: dict[str, list[dict[str, Any]]] = {"forwards": [], "backwards": []}

    def add(self, wrapper: nn.Module) -> None:
        """Trace a model that was wrapped just now.

        Args:
            wrapper: has the model as `module`, and as `bucket_plan` its buckets, if they are known.
        """
        with self.phases.inside("tracing"):
            traced = TracedModel(len(self._models), wrapper, self.phases, finite=self._finite is not None)
            traced.own.deep = self._deep
            self._models.append(traced)
            for name, param in zip(traced.names, traced.params, strict=True):
                self._optimizers.names[id(param)] = f"{traced.number}:{name}" if traced.number else name
            self._hooks += [
                wrapper.register_forward_pre_hook(WrapperHook(self._forward_begins, traced), with_kwargs=True),
                wrapper.register_forward_hook(WrapperHook(self._forward_ended, traced), with_kwargs=True),
            ]
            self._file.write("model", traced.facts(wrapper))

    def _forward_begins(self, traced: TracedModel, wrapper: nn.Module, args: Any, kwargs: Any) -> None:
        training = inside(wrapper).training
        if not (torch.is_grad_enabled() and training):
            at = user_line()
            self.evaluated[at] = self.evaluated.get(at, 0) + 1
        if not torch.is_grad_enabled():
            return
        with self.phases.inside("tracing"):
            context = [
                str(torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
            ]
            forward = {
                "model": traced.number,
                "training": training,
                "context": context,
                "random": hashes_of_random_state(),
                "inputs": hash_of_all([args, kwargs]),
            }
            if self._deep and not self._in_step:
                forward["weights"] = {str(traced.number): [hash_of(param) for param in traced.params]}
            self._line["forwards"].append(forward)
        self.phases.enter("forward")

    def _forward_ended(self, traced: TracedModel, wrapper: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        forwards = self._line["forwards"]
        if not torch.is_grad_enabled() or not forwards:
            return
        traced.forward_ended(training=inside(wrapper).training)
        self.phases.enter("tracing")
        forwards[-1]["outputs"] = hash_of_all(outputs)
        if self._deep:
            forwards[-1]["buffers"] = hash_of_all(list(inside(wrapper).buffers()))
        self.phases.enter("outside")

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Note that a backward of these tensors begins, which is not inside another one."""
        self.phases.enter("tracing")
        for traced in self._models:
            if self._deep:
                traced.own.surround()
            traced.begin()
        values = [root for root in roots if isinstance(root, Tensor)]
        number = values[0].detach() if len(values) == 1 and values[0].numel() == 1 else None
        self._running = {"loss": hash_of_all(values), "value": number}
        self._line["backwards"].append(self._running)
        self.phases.enter("backward")

    def backward_ended(self) -> None:
        """Note that it has ended; gradients are averaged.

        Where an optimizer has stepped meanwhile, the line with this backward is written already.
        """
        self.phases.enter("tracing")
        for traced in self._models:
            if not traced.own.is_reached:
                continue
            if self._finite is not None:
                self._finite.backward_ended(self._running, str(traced.number), traced.own.looks)
            traced.backward_ended(self._running, buffers=self._buffers)
            traced.begin()
        self.phases.enter("outside")

    def backward_failed(self) -> None:
        """Note that it has raised: only later forwards decide what the next one does."""
        for traced in self._models:
            traced.backward_failed()

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`."""
        self.phases.enter("tracing")
        self._in_step = True
        params = params_of(optimizer)
        if self._deep:
            self._hashes.before_step(params)
        if self._finite is not None:
            self._finite.before_step(optimizer, params)
        self.phases.enter("optimizer")

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        self._in_step = False
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.phases.enter("device")  # else the wait would count as tracing
            torch.cuda.synchronize()
        self.phases.enter("tracing")
        number, steps = self._optimizers.step(optimizer)
        params = params_of(optimizer)
        line = {"step": self._lines, "optimizer": number, "settings": settings_of(optimizer), **self._line}
        line |= self._hashes.after_step(params, deep=self._deep)
        if self._finite is not None:
            line |= self._finite.after_step(optimizer, params)
        plans = {}
        for traced in self._models:
            traced.after_step()
            if (buckets := traced.new_buckets()) is not None:
                plans[str(traced.number)] = buckets
        if plans:
            line["plan"] = plans
        line = as_json(line)
        self._lines += 1
        if self._lines == 1:
            self.phases.lines.clear()  # what came before may have been no training
        self._deep = steps < self._deep_steps
        for traced in self._models:
            traced.own.deep = self._deep
            if not self._deep:
                traced.own.leave()
        self._begin_line()
        self._file.write("step", {**line, "times": self.phases.taken()})
        if self._after_step is not None:
            self._after_step(steps)
        self.phases.enter("outside")

    def note(self, what: Call, about: Set[int], at: str = "") -> None:
        """Write a call of the program into the line of the next step.

        Args:
            what: it does.
            about: the ids of the parameters that it is about.
            at: the line of the program; empty: the one that is running.
        """
        own = {number: {*map(id, params)} for number, params in self.stepped().items()}
        of = [number for number, ids in own.items() if ids & about]
        whole = [number for number, ids in own.items() if ids <= about]
        call = {"what": what.value, "at": at or user_line(), "of": of, "whole": whole}
        self._line.setdefault(CALLS, []).append(call)

    def stepped(self) -> dict[int, list[Tensor]]:
        """Return the parameters of each optimizer that has stepped and is still there, by its number."""
        return self._optimizers.params()

    def wrapped(self) -> list[Tensor]:
        """Return the parameters of the wrapped models that were trained when they were wrapped."""
        return [param for traced in self._models for param in traced.params]

    @property
    def since_step(self) -> int:
        """The number of averaged backwards since the last step of an optimizer."""
        return sum(not one.keys().isdisjoint(AVERAGED) for one in self._line["backwards"])

    def unused(self) -> dict[str, list[str]]:
        """Return, by the number of the model, the names of parameters that are trained and have got no gradient."""
        return {str(traced.number): traced.unused() for traced in self._models if traced.own.used}

    def close(self) -> None:
        """Remove the hooks from the models, and close the file."""
        for hook in self._hooks:
            hook.remove()
        for traced in self._models:
            traced.own.remove()
        self._file.close()
