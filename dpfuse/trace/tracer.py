"""Hashes what a rank computes, and writes a line after each optimizer step. Works for torch's wrapper and for ours."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.random_states import hashes_of_random_state
from dpfuse.engine.sample import Sample, is_dense, sample_of
from dpfuse.engine.tensor_hash import NOTHING, Hash, hash_of, hash_of_all, joined, read, text_of
from dpfuse.engine.torch_private import leave_untraced
from dpfuse.engine.user_line import user_line
from dpfuse.trace.finite import FiniteLook, Look, is_finite
from dpfuse.trace.phases import Phases
from dpfuse.trace.program_hooks import HooksAround, TraceHook
from dpfuse.trace.rescaling import Pair, rescaled
from dpfuse.trace.settings import process_settings
from dpfuse.trace.sketch import signed_sum
from dpfuse.trace.trace_file import (
    BEFORE_STEP,
    CALLS,
    HELD,
    HOOKED,
    LEFT,
    MICRO_BATCHES,
    MODULE_BUFFERS,
    RANKS,
    RESCALED,
    Call,
    Writer,
)

__all__ = ["Tracer", "params_of"]

FEW = 4  # small gradients of a model, which tell whether the program has zeroed
BITS = 0xFFFFFFFF  # of a hash


class _Traced:
    """One wrapped model.

    Args:
        number: in the order in which models were wrapped.
        wrapper: torch's or ours.
    """

    def __init__(self, number: int, wrapper: nn.Module) -> None:
        self.number = number
        self.wrapper = weakref.ref(wrapper)
        named = [(name, param) for name, param in _inside(wrapper).named_parameters() if param.requires_grad]
        self.names = [name for name, _ in named]
        self.buffer_names = [name for name, _ in _inside(wrapper).named_buffers()]
        self.params = [param for _, param in named]
        self.small_first = sorted(self.params, key=Tensor.numel)
        self.written: list[list[str]] | None = None  # the buckets in the file
        self.used: set[int] = set()  # parameters that have got a gradient
        self.samples: dict[int, Sample] = {}  # of what the last backward since a step has left in `.grad`
        self.begin()

    def begin(self) -> None:
        """Begin another backward: forget what hooks have noted, also those of `torch.autograd.grad` since the last."""
        self.local: list[Hash] = [NOTHING] * len(self.params)  # of this rank's gradients in the backward that runs
        self.behind: list[Hash] = [*self.local]  # of them after hooks of the program, where it has some
        self.rewritten: list[Hash] = [*self.local]  # what such hooks have made of `.grad`; 0 where it is as before
        self.held: list[Hash] | None = None  # what `.grad` held when it reached this model, if it has: see `in_grad`
        self.pairs: list[Pair] = []  # samples of `.grad` after the last backward, and as this one begins
        self.looks: list[Look] = []  # at these gradients, whether they are finite

    def reached(self, deep: bool) -> None:
        """Note what there is before the backward that runs adds the first gradient."""
        self.held = self.in_grad()
        grads = [(place, sample, self.params[place].grad) for place, sample in self.samples.items()] if deep else []
        self.pairs = [
            Pair(place, sample, sample_of(grad, spread=True))
            for place, sample, grad in grads
            if grad is not None and is_dense(grad)
        ]

    def in_grad(self) -> list[Hash]:
        """Return 1 for each of a few small gradients that are there and are not zeros, and 0 for zeros."""
        grads = (param.grad for param in self.small_first)
        return [_is_not_zero(grad) for grad in islice((grad for grad in grads if grad is not None), FEW)]

    def hooked(self) -> list[Hash]:
        """Return the hashes of this rank's gradients after hooks of the program; nothing where it has none."""
        found: list[Hash] = []
        for local, behind, rewritten in zip(self.local, self.behind, self.rewritten, strict=True):
            if local is NOTHING or (behind is NOTHING and rewritten is NOTHING):
                found.append(NOTHING)
            else:
                found.append((local if behind is NOTHING else behind) ^ _number(rewritten))
        return found

    def sample(self) -> None:
        """Copy a few elements of each gradient."""
        grads = ((place, param.grad) for place, param in enumerate(self.params))
        self.samples = {
            place: sample_of(grad, spread=True) for place, grad in grads if grad is not None and is_dense(grad)
        }

    def buffer_hashes(self) -> list[Hash]:
        """Return the hashes of the buffers that there were at first."""
        wrapper = self.wrapper()
        found = {} if wrapper is None else dict(_inside(wrapper).named_buffers())
        return [hash_of(found.get(name)) for name in self.buffer_names]

    def synchronises(self) -> bool:
        """Whether a backward that begins now averages, as far as its wrapper says."""
        return bool(getattr(self.wrapper(), "require_backward_grad_sync", True))

    def buckets(self) -> list[list[str]] | None:
        """Return the names of the parameters of each bucket; None where they are not known, as in torch's class."""
        plan: BucketPlan | None = getattr(self.wrapper(), "bucket_plan", None)
        if plan is None:
            return None
        return [[plan.specs[index].name for index in bucket.params] for bucket in plan.buckets]


class _Gradient:
    """Hashes the gradient of one parameter of this rank before it is averaged, and notes that there is one.

    Args:
        traced: the model.
        index: of the parameter.
        tracer: says whether to hash.
    """

    def __init__(self, traced: _Traced, index: int, tracer: Tracer) -> None:
        self._traced = traced
        self._index = index
        self._tracer = tracer

    def computed(self, grad: Tensor) -> None:
        """Take what the backward has computed."""
        traced, index = self._traced, self._index
        traced.used.add(index)
        deep = self._tracer.deep
        if not deep and traced.held is not None:
            return
        with self._tracer.phases.inside("tracing"):
            if traced.held is None:
                traced.reached(deep)
            if deep:
                traced.local[index] = hash_of(grad, _number(traced.local[index]))

    def hooked(self, grad: Tensor) -> None:
        """Take what hooks of the program have made of it."""
        with self._tracer.phases.inside("tracing"):
            behind = self._traced.behind
            behind[self._index] = hash_of(grad, _number(behind[self._index]))

    def accumulated(self, param: Tensor) -> None:
        """Look at `.grad` before hooks of the program, and again after them: equal hashes cancel each other out."""
        with self._tracer.phases.inside("tracing"):
            rewritten = self._traced.rewritten
            rewritten[self._index] = _number(rewritten[self._index]) ^ (hash_of(param.grad) & BITS)


def _number(found: Hash) -> Hash:
    """Return a hash from which to go on; 0 where there is none yet."""
    return 0 if found is NOTHING else found


class _OwnLook:
    """Looks at the gradient of one parameter of this rank for values that are not finite.

    Args:
        traced: the model.
        index: of the parameter.
        phases: to which the time counts.
    """

    def __init__(self, traced: _Traced, index: int, phases: Phases) -> None:
        self._traced = traced
        self._index = index
        self._phases = phases

    def __call__(self, grad: Tensor) -> None:
        with self._phases.inside("tracing"):
            finite = is_finite(grad)
        if finite is not True:
            self._traced.looks.append((self._index, finite))


class Tracer:
    """Writes the trace of this rank.

    Args:
        folder: for the file.
        deep_steps: how many steps of an optimizer have hashes of gradients and of buffers, and of each parameter; the
            others have one number for all parameters. None: all.
        after_step: called after each line, with the number of steps of that optimizer.
        sketch: write a sum of each parameter and gradient with fixed random signs, too, from which the distance of two
            runs follows.
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
        self.phases = Phases()
        self.evaluated: dict[str, int] = {}  # by the line: calls of models without gradients, or in eval mode
        self.deep = deep_steps is None or deep_steps > 0
        self._deep_steps = math.inf if deep_steps is None else deep_steps
        self._after_step = after_step
        self._sketch = sketch
        self._buffers = buffers
        self._finite = FiniteLook() if finite else None
        self._models: list[_Traced] = []
        self._optimizers: list[tuple[weakref.ref[Optimizer], int, list[int]]] = []  # with its number and its steps
        self._names: dict[int, str] = {}  # of parameters, by id
        self._forwards: list[dict[str, Any]] = []
        self._backwards: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._running: dict[str, Any] = {}  # the backward that runs, or has ended last
        self._looks: list[tuple[dict[str, Any], str, list[Pair]]] = []  # of these backwards, with a model's number
        self._stepped: list[Hash] = []
        self._before_step: list[Hash] = []  # the parameters of the optimizer
        self._in_step = False  # whether an optimizer steps just now
        self._gradient: list[Tensor | float] = []  # its sketch
        self._lines = 0
        rank = dist.get_rank()
        self._gradients: list[HooksAround] = []
        self._hooks: list[RemovableHandle] = []
        self._file = Writer(folder, rank)
        self._file.write("settings", {**process_settings(), "random": hashes_of_random_state()})

    def add(self, wrapper: nn.Module) -> None:
        """Trace a model that was wrapped just now.

        Args:
            wrapper: has the model as `module`, and as `bucket_plan` its buckets, if they are known.
        """
        with self.phases.inside("tracing"):
            traced = _Traced(len(self._models), wrapper)
            self._models.append(traced)
            for index, (name, param) in enumerate(zip(traced.names, traced.params, strict=True)):
                self._names[id(param)] = f"{traced.number}:{name}" if traced.number else name
                gradient = _Gradient(traced, index, self)
                self._gradients.append(HooksAround(param, gradient.computed, gradient.hooked, gradient.accumulated))
                if self._finite is not None:
                    self._hooks.append(param.register_hook(TraceHook(_OwnLook(traced, index, self.phases))))
            self._hooks += [
                wrapper.register_forward_pre_hook(_Hook(self._forward_begins, traced), with_kwargs=True),
                wrapper.register_forward_hook(_Hook(self._forward_ended, traced), with_kwargs=True),
            ]
            facts = {
                "number": traced.number,
                "class": type(_inside(wrapper)).__name__,
                "wrapper": type(wrapper).__module__.partition(".")[0],
                "names": traced.names,
                "shapes": [list(param.shape) for param in traced.params],
                "dtypes": [str(param.dtype) for param in traced.params],
                "buffers": traced.buffer_names,
                "random": hashes_of_random_state(),
                "parameters": text_of(read([hash_of(param) for param in traced.params])),
                RANKS: _ranks_of(wrapper),
            }
            options = getattr(wrapper, "_options", None)  # torch's class has none
            if (count := getattr(options, "micro_batches", None)) is not None:
                facts[MICRO_BATCHES] = count
            self._file.write("model", facts)

    def _forward_begins(self, traced: _Traced, wrapper: nn.Module, args: Any, kwargs: Any) -> None:
        if not (torch.is_grad_enabled() and _inside(wrapper).training):
            line_of = user_line()
            self.evaluated[line_of] = self.evaluated.get(line_of, 0) + 1
        if not torch.is_grad_enabled():
            return
        with self.phases.inside("tracing"):
            context = [
                str(torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
            ]
            line: dict[str, Any] = {
                "model": traced.number,
                "training": _inside(wrapper).training,
                "context": context,
                "random": hashes_of_random_state(),
                "inputs": hash_of_all([args, kwargs]),
            }
            if self.deep and not self._in_step:
                line["weights"] = {str(traced.number): [hash_of(param) for param in traced.params]}
            self._forwards.append(line)
        self.phases.enter("forward")

    def _forward_ended(self, traced: _Traced, wrapper: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or not self._forwards:
            return
        self.phases.enter("tracing")
        self._forwards[-1]["outputs"] = hash_of_all(outputs)
        if self.deep:
            self._forwards[-1]["buffers"] = hash_of_all(list(_inside(wrapper).buffers()))
        self.phases.enter("outside")

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Note that a backward of these tensors begins, which is not inside another one."""
        self.phases.enter("tracing")
        if self.deep:
            for hooks in self._gradients:
                hooks.surround()
        for traced in self._models:
            traced.begin()
        values = [root for root in roots if isinstance(root, Tensor)]
        number = values[0].detach() if len(values) == 1 and values[0].numel() == 1 else None
        self._running = {"loss": hash_of_all(values), "value": number}
        self._backwards.append(self._running)
        self.phases.enter("backward")

    def backward_ended(self) -> None:
        """Note that it has ended; gradients are averaged.

        Where an optimizer has stepped meanwhile, the line with this backward is written already.
        """
        self.phases.enter("tracing")
        line = self._running
        for traced in self._models:
            if traced.held is None:
                continue
            number = str(traced.number)
            line.setdefault(HELD, {})[number] = traced.held
            if self._finite is not None:
                self._finite.backward_ended(line, number, traced.looks)
            if self.deep:
                line.setdefault("local", {})[number] = traced.local
                line.setdefault(HOOKED, {})
                if any(one is not NOTHING for one in (*traced.behind, *traced.rewritten)):
                    line[HOOKED][number] = traced.hooked()
                self._looks.append((line, number, traced.pairs))
                traced.sample()
            traced.begin()
            if traced.synchronises():
                averaged = [hash_of(param.grad) for param in traced.params]
                if self.deep and self._buffers:
                    line.setdefault(MODULE_BUFFERS, {})[number] = traced.buffer_hashes()
                if self.deep:
                    line.setdefault("averaged", {})[number] = averaged
                else:
                    line.setdefault("all_averaged", {})[number] = joined(averaged)
            else:
                line.setdefault(LEFT, {})[number] = traced.in_grad()
        self.phases.enter("outside")

    def before_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.before_step`."""
        self.phases.enter("tracing")
        self._in_step = True
        if self.deep:
            self._stepped = [hash_of(param.grad) for param in params_of(optimizer)]
            self._before_step = [hash_of(param) for param in params_of(optimizer)]
            if self._sketch:
                self._gradient = [0.0 if one.grad is None else signed_sum(one.grad) for one in params_of(optimizer)]
        if self._finite is not None:
            self._finite.before_step(optimizer, params_of(optimizer))
        self.phases.enter("optimizer")

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`."""
        self._in_step = False
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.phases.enter("device")  # else the wait would count as tracing
            torch.cuda.synchronize()
        self.phases.enter("tracing")
        number, steps = self._known(optimizer)
        steps[0] += 1
        params = [hash_of(param) for param in params_of(optimizer)]
        line: dict[str, Any] = {"step": self._lines, "optimizer": number, "settings": _settings_of(optimizer)}
        line |= {"forwards": self._forwards, "backwards": self._backwards}
        if self._calls:
            line[CALLS] = self._calls
        if self.deep:
            line |= {"stepped": self._stepped, BEFORE_STEP: self._before_step, "parameters": params}
        else:
            line["all_parameters"] = joined(params)
        if self._sketch:
            line["sketch"] = [signed_sum(param) for param in params_of(optimizer)]
            if self.deep:
                line["gradient sketch"] = self._gradient
        if self._finite is not None:
            line |= self._finite.after_step(optimizer, params_of(optimizer))
        for backward, model, pairs in self._looks:
            if places := rescaled(pairs):
                backward.setdefault(RESCALED, {})[model] = places
        plans = {}
        for traced in self._models:
            traced.samples = {}  # an optimizer may change gradients
            buckets = traced.buckets()
            if buckets is not None and buckets != traced.written:
                traced.written = plans[str(traced.number)] = buckets
        if plans:
            line["plan"] = plans
        line = _resolved(line)
        self._lines += 1
        if self._lines == 1:
            self.phases.lines.clear()  # what came before may have been no training
        self.deep = steps[0] < self._deep_steps
        if not self.deep:
            for hooks in self._gradients:
                hooks.leave()
        self._forwards, self._backwards, self._looks, self._calls = [], [], [], []
        self._stepped, self._before_step = [], []
        self._file.write("step", {**line, "times": self.phases.taken()})
        if self._after_step is not None:
            self._after_step(steps[0])
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
        self._calls.append({"what": what.value, "at": at or user_line(), "of": of, "whole": whole})

    def stepped(self) -> dict[int, list[Tensor]]:
        """Return the parameters of each optimizer that has stepped and is still there, by its number."""
        found = ((number, reference()) for reference, number, _ in self._optimizers)
        return {number: params_of(optimizer) for number, optimizer in found if optimizer is not None}

    def wrapped(self) -> list[Tensor]:
        """Return the parameters of the wrapped models that were trained when they were wrapped."""
        return [param for traced in self._models for param in traced.params]

    @property
    def since_step(self) -> int:
        """The number of averaged backwards since the last step of an optimizer."""
        return sum(bool(one.keys() & {"averaged", "all_averaged"}) for one in self._backwards)

    def unused(self) -> dict[str, list[str]]:
        """Return, by the number of the model, the names of parameters that are trained and have got no gradient."""
        return {
            str(traced.number): [
                name
                for index, (name, param) in enumerate(zip(traced.names, traced.params, strict=True))
                if index not in traced.used and param.requires_grad
            ]
            for traced in self._models
            if traced.used
        }

    def close(self) -> None:
        """Remove the hooks from the models, and close the file."""
        for hook in self._hooks:
            hook.remove()
        for hooks in self._gradients:
            hooks.remove()
        self._file.close()

    def _known(self, optimizer: Optimizer) -> tuple[int, list[int]]:
        """Return the number of an optimizer, in the order of their first steps, and its counter of steps."""
        for reference, number, steps in self._optimizers:
            if reference() is optimizer:
                return number, steps
        number, steps = len(self._optimizers), [0]
        self._optimizers.append((weakref.ref(optimizer), number, steps))
        names = [self._names.get(id(param), f"parameter {index}") for index, param in enumerate(params_of(optimizer))]
        self._file.write("optimizer", {"number": number, "class": type(optimizer).__name__, "names": names})
        return number, steps


def _ranks_of(wrapper: Any) -> int:
    """Return over how many ranks it averages."""
    group = getattr(wrapper, "process_group", None) or getattr(wrapper, "_group", None)
    return 1 if group is None else int(group.size())


def _inside(wrapper: nn.Module) -> nn.Module:
    module = wrapper.module
    assert isinstance(module, nn.Module)
    return module


class _Hook:
    """A hook of a wrapper that stays with this wrapper: copies and files of it do not have it."""

    def __init__(self, call: Callable[..., None], traced: _Traced) -> None:
        self._call = call
        self._traced = traced

    def __call__(self, *args: Any) -> None:
        self._call(self._traced, *args)

    leave_untraced(__call__, calls=True, reason="a trace of dpfuse reads here what goes in and what comes out")

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Stands for the hook in a copy."""


def _is_not_zero(grad: Tensor) -> Hash:
    """Return 1 for a gradient that is not zero everywhere, or that is not plain; 0 for zeros."""
    if not is_dense(grad):
        return 1
    return int(grad.any()) if grad.is_cpu else grad.any().long()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers, switches and texts of each group of an optimizer, as JSON values."""
    groups = []
    for group in optimizer.param_groups:
        values = {
            name: value.item() if _is_number(value) else value for name, value in group.items() if name != "params"
        }
        groups.append(
            {
                name: repr(value) if isinstance(value, (float, tuple, list)) else value
                for name, value in values.items()
                if isinstance(value, (float, int, str, tuple, list))
            }
        )
    return groups


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _resolved(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line as JSON values, after one wait for the device."""
    found: list[Hash] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                found.append(value)
        elif isinstance(value, dict):
            for one in value.values():
                collect(one)
        elif isinstance(value, list):
            for one in value:
                collect(one)

    collect(line)
    numbers = iter(read(found))

    def resolve(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double().item() if value.is_floating_point() else next(numbers)
        if isinstance(value, dict):
            return {key: resolve(key, one) for key, one in value.items()}
        if isinstance(value, list):
            return [resolve(name, one) for one in value]
        return value

    return _in_characters(resolve("", line))


def _in_characters(line: dict[str, Any]) -> dict[str, Any]:
    """Write hashes as texts: eight characters for each."""
    for name, value in line.items():
        if name in ("stepped", BEFORE_STEP, "parameters"):
            line[name] = text_of(value)
        elif name in ("local", "averaged", "weights", HOOKED, MODULE_BUFFERS):
            line[name] = {number: text_of(hashes) for number, hashes in value.items()}
        elif name in ("inputs", "outputs", "buffers", "loss", "all_parameters"):
            line[name] = text_of([value])
        elif name == "all_averaged":
            line[name] = {number: text_of([hashed]) for number, hashed in value.items()}
        elif name in ("forwards", "backwards"):
            line[name] = [_in_characters(one) for one in value]
        elif name == "value" and isinstance(value, float) and not math.isfinite(value):
            line[name] = repr(value)
    return line
