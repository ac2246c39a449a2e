"""Notes in a trace the means over ranks that a program takes of gradients which are equal on all ranks already.

Only a call whose result shows that gradients were equal is noted: their norm is as before, or as many times larger as
there are ranks. So a program may look at the gradients of all ranks, or average what each rank has added by itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.commands.doctor.gradient_state import write_count
from dpfuse.commands.doctor.replaced_function import replace
from dpfuse.engine.sample import is_dense
from dpfuse.engine.streams import capturing
from dpfuse.engine.user_line import user_line
from dpfuse.trace.tracer import Tracer
from dpfuse.trace_file import Call

__all__ = ["MeansByHand"]

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor")
GATHERING = COLLECTIVES[-2:]
ROUNDINGS = 4  # of the dtype of a gradient: by so much its norm may differ from what equal gradients would give
FUSED = "dpfuse.manual.fused_allreduce"  # the module
LIBRARIES = ("torch.", "dpfuse.")  # modules whose calls are not those of the program


@dataclass(frozen=True)
class _Mean:
    """A mean that the program may be taking of one gradient.

    Args:
        norm: of the gradient before.
        at: the line of the program.
        state: of `.grad` before, where the program has to write the mean itself; None where the call writes it.
    """

    norm: float
    at: str
    state: tuple[int, ...] | None


class MeansByHand:
    """Hears the collectives of this process from now on.

    Args:
        tracer: returns where to note them; None before a model is wrapped.
    """

    def __init__(self, tracer: Callable[[], Tracer | None]) -> None:
        self._tracer = tracer
        self._hears_fused = False
        self._forget()
        for name in COLLECTIVES if dist.is_available() else ():
            replace(dist, name, partial(self._called, name, inspect.signature(getattr(dist, name))))

    def _forget(self) -> None:
        self._means: dict[int, _Mean] = {}  # by the id of a parameter; the result is still to come
        self._reduced: dict[int, float] = {}  # norms of gradients before one rank has got their sum
        self._equal: dict[str, set[int]] = {}  # ids of parameters whose gradients were equal, by the line
        self._differ = False  # whether other gradients were not

    def settle(self, tracer: Tracer) -> None:
        """Note the means since the last call of this method; none of them where the gradients of one differed."""
        if self._means or self._equal or self._differ:
            self._look(tracer, [*self._means])
            for line, params in {} if self._differ else self._equal.items():
                tracer.note(Call.MEAN, params, line)
        self._forget()

    def hear_fused(self) -> None:
        """Hear `fused_allreduce_gradients` from now on, if the program has imported it.

        Its calls come through a method of a class: the program may hold the function under another name.
        """
        module = sys.modules.get(FUSED)
        if module is not None and not self._hears_fused:
            self._hears_fused = True
            replace(module._Prepared, "average", self._average)

    def _average(self, plain: Any, prepared: Any, group: Any) -> None:
        tracer = _looking(self._tracer)
        if tracer is None or not _has_all_ranks(group):
            plain(prepared, group)
            return
        with tracer.phases.inside("tracing"):
            grads = _grads(tracer, prepared.params)
            means = {param: _Mean(norm, user_line(), None) for param, norm in _norms(grads).items()}
            self._means |= means
        plain(prepared, group)
        with tracer.phases.inside("tracing"):
            self._look(tracer, means)

    def _called(self, name: str, signature: inspect.Signature, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
        tracer = _looking(self._tracer)
        if tracer is None or sys._getframe(2).f_globals.get("__name__", "").startswith(LIBRARIES):
            return plain(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return plain(*args, **kwargs)  # which says what is wrong
        with tracer.phases.inside("tracing"):
            written = self._begun(tracer, name, given)
        result = plain(*args, **kwargs)
        if written:
            with tracer.phases.inside("tracing"):
                self._look(tracer, written)
        return result

    def _begun(self, tracer: Tracer, name: str, given: Mapping[str, Any]) -> list[int]:
        """Take a call of the program before it runs; return the parameters whose gradients it will have written."""
        tensor = given.get("input_tensor", given.get("tensor"))
        adds_up = given.get("op", dist.ReduceOp.SUM) in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if not isinstance(tensor, Tensor) or not adds_up or not _has_all_ranks(given.get("group")):
            return []
        grads, is_copy = _gradients_in(tensor, tracer)
        norms = _norms(grads)
        if name == "reduce" and not is_copy:
            self._reduced = {**norms, **self._reduced}
            return []
        if name == "broadcast":
            norms = {param: self._reduced[param] for param in norms if param in self._reduced and not is_copy}
        is_apart = is_copy or name in GATHERING
        at = user_line()
        means = {param: _Mean(norm, at, _state(grads[param]) if is_apart else None) for param, norm in norms.items()}
        self._means |= means
        return [] if is_apart or given.get("async_op") else [*means]

    def _look(self, tracer: Tracer, params: Iterable[int]) -> None:
        """Look at what has become of gradients."""
        means = {param: self._means.pop(param) for param in params}
        grads = _grads(tracer, tracer.wrapped())
        size = dist.get_world_size()
        for param, mean in means.items():
            grad = grads.get(param)
            if grad is None or _state(grad) == mean.state:
                continue  # the program has only looked at it
            norm, rounding = _norm(grad), ROUNDINGS * torch.finfo(grad.dtype).eps
            if any(abs(norm - times * mean.norm) <= rounding * times * mean.norm for times in (1, size)):
                self._equal.setdefault(mean.at, set()).add(param)
            else:
                self._differ = True


def _looking(tracer: Callable[[], Tracer | None]) -> Tracer | None:
    """Return the tracer where values can be looked at now, which neither a compiler nor a CUDA graph lets one do."""
    return None if torch.compiler.is_compiling() or capturing() else tracer()


def _has_all_ranks(group: Any) -> bool:
    """Whether a group has all ranks, and these are several: of one rank everything is equal."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    return size > 1 and (group is None or dist.get_world_size(group) == size)


def _grads(tracer: Tracer, params: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the gradients that a wrapper averages, of these parameters, by the id of each."""
    wrapped = {id(param) for param in tracer.wrapped()}
    found = {id(param): param.grad for param in params if id(param) in wrapped}
    return {
        param: grad for param, grad in found.items() if grad is not None and is_dense(grad) and grad.is_floating_point()
    }


def _gradients_in(tensor: Tensor, tracer: Tracer) -> tuple[dict[int, Tensor], bool]:
    """Return the gradient that this tensor is, or all of an optimizer if it is a flat copy, and whether it is one."""
    for params in tracer.stepped().values():
        grads = _grads(tracer, params)
        own = {
            param: grad
            for param, grad in grads.items()
            if grad.data_ptr() == tensor.data_ptr() and grad.numel() == tensor.numel()
        }
        if own:
            return own, False
        if not grads or tensor.ndim != 1 or tensor.numel() != sum(grad.numel() for grad in grads.values()):
            continue
        first = next(iter(grads.values())).flatten()
        if first.dtype is tensor.dtype and first.device == tensor.device and torch.equal(first, tensor[: len(first)]):
            return grads, True
    return {}, False


def _norms(grads: Mapping[int, Tensor]) -> dict[int, float]:
    """Return the norms of gradients that are not zeros."""
    return {param: norm for param, grad in grads.items() if (norm := _norm(grad))}


def _norm(grad: Tensor) -> float:
    return float(torch.linalg.vector_norm(grad.detach(), dtype=torch.float64))


def _state(grad: Tensor) -> tuple[int, ...]:
    """Return what changes where a gradient is written or replaced."""
    return id(grad), grad.data_ptr(), write_count(grad)
