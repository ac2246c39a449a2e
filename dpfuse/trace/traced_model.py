"""What a trace notes of one wrapped model: its own line, and its fields in the lines of backwards."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

from torch import Tensor, nn

from dpfuse.engine.plan import BucketPlan
from dpfuse.engine.random_states import hashes_of_random_state
from dpfuse.engine.sample import is_dense
from dpfuse.engine.tensor_hash import Hash, hash_of, joined, read, text_of
from dpfuse.trace.gradients_between_backwards import GradientsBetween
from dpfuse.trace.own_gradients import OwnGradients
from dpfuse.trace.step_phases import StepPhases
from dpfuse.trace_file import HELD, HOOKED, LEFT, MICRO_BATCHES, MODULE_BUFFERS, RANKS

__all__ = ["TracedModel", "inside"]

FEW = 4  # small gradients of a model, which tell whether the program has zeroed


class TracedModel:
    """One wrapped model.

    Args:
        number: in the order in which models were wrapped.
        wrapper: torch's or ours.
        phases: to which the time of hooks counts.
        finite: look for gradients that are not finite, too.

    Attributes:
        number: of the model.
        names, params: of what is trained.
        own: the gradients of this rank.
    """

    def __init__(self, number: int, wrapper: nn.Module, phases: StepPhases, *, finite: bool) -> None:
        self.number = number
        self._wrapper = weakref.ref(wrapper)
        named = {name: param for name, param in inside(wrapper).named_parameters() if param.requires_grad}
        self.names, self.params = [*named], [*named.values()]
        self._small_first = sorted(self.params, key=Tensor.numel)
        self._buffer_names = [name for name, _ in inside(wrapper).named_buffers()]
        self._written: list[list[str]] | None = None  # the buckets in the file
        self._asked: dict[bool, bool] = {}  # whether a backward is to average, by whether the forward was for training
        self._is_ours = hasattr(wrapper, "_options")  # torch's class has none
        self._held: list[Hash] = []  # what `.grad` held when the backward that runs reached this model
        self._samples = GradientsBetween(self.params)
        self.own = OwnGradients(self.params, phases, self._reached, finite=finite)

    def facts(self, wrapper: nn.Module) -> dict[str, Any]:
        """Return what its own line says."""
        facts = {
            "number": self.number,
            "class": type(inside(wrapper)).__name__,
            "wrapper": type(wrapper).__module__.partition(".")[0],
            "names": self.names,
            "shapes": [list(param.shape) for param in self.params],
            "dtypes": [str(param.dtype) for param in self.params],
            "buffers": self._buffer_names,
            "random": hashes_of_random_state(),
            "parameters": text_of(read([hash_of(param) for param in self.params])),
            RANKS: _ranks_of(wrapper),
        }
        options = getattr(wrapper, "_options", None)
        if (count := getattr(options, "micro_batches", None)) is not None:
            facts[MICRO_BATCHES] = count
        return facts

    def forward_ended(self, *, training: bool) -> None:
        """Note what the backward to come is to do: it averages if one of its forwards ran outside of `no_sync()`.

        In dpfuse forwards in eval mode count where no other one has run since. In torch's class all of them count.
        """
        training = training or not self._is_ours
        self._asked[training] = self._asked.get(training, False) or self._is_to_average()

    def begin(self) -> None:
        """Begin another backward."""
        self.own.begin()
        self._samples.begin()

    def _reached(self) -> None:
        self._held = self._in_grad()
        if self.own.deep:
            self._samples.reached()

    def backward_ended(self, line: dict[str, Any], *, buffers: bool) -> None:
        """Write its fields into the line of a backward that has reached it.

        Args:
            line: of the backward.
            buffers: hash each buffer, too, if this backward averages.
        """
        number, deep = str(self.number), self.own.deep
        line.setdefault(HELD, {})[number] = self._held
        if deep:
            line.setdefault("local", {})[number] = self.own.local
            hooks = line.setdefault(HOOKED, {})
            if (hooked := self.own.hooked()) is not None:
                hooks[number] = hooked
            self._samples.backward_ended(line)
        if not self._asked.get(True, self._asked.get(False, self._is_to_average())):
            line.setdefault(LEFT, {})[number] = self._in_grad()
            return
        self._asked.clear()
        averaged = [hash_of(param.grad) for param in self.params]
        if deep and buffers:
            line.setdefault(MODULE_BUFFERS, {})[number] = self._buffer_hashes()
        line.setdefault("averaged" if deep else "all_averaged", {})[number] = averaged if deep else joined(averaged)

    def backward_failed(self) -> None:
        """Forget what the forwards before have asked for, if it has reached this model."""
        if self.own.is_reached:
            self._asked.clear()

    def after_step(self) -> None:
        """Complete the lines of the backwards since the step before. Waits for the device."""
        self._samples.after_step(str(self.number))

    def new_buckets(self) -> list[list[str]] | None:
        """Return the names of the parameters of each bucket, if they are others than at the last call.

        None where they are the same or not known, as in torch's class.
        """
        plan: BucketPlan | None = getattr(self._wrapper(), "bucket_plan", None)
        if plan is None:
            return None
        buckets = [[plan.specs[index].name for index in bucket.params] for bucket in plan.buckets]
        if buckets == self._written:
            return None
        self._written = buckets
        return buckets

    def unused(self) -> list[str]:
        """Return the names of parameters that are trained and have got no gradient."""
        return [
            name
            for place, (name, param) in enumerate(zip(self.names, self.params, strict=True))
            if place not in self.own.used and param.requires_grad
        ]

    def _is_to_average(self) -> bool:
        """Whether the program asks for averaged gradients just now."""
        return bool(getattr(self._wrapper(), "require_backward_grad_sync", True))

    def _in_grad(self) -> list[Hash]:
        """Return 1 for each of a few small gradients that are there and are not zeros, and 0 for zeros."""
        grads = (param.grad for param in self._small_first)
        return [_is_not_zero(grad) for grad in islice((grad for grad in grads if grad is not None), FEW)]

    def _buffer_hashes(self) -> list[Hash]:
        """Return the hashes of the buffers that there were at first."""
        wrapper = self._wrapper()
        found = {} if wrapper is None else dict(inside(wrapper).named_buffers())
        return [hash_of(found.get(name)) for name in self._buffer_names]


def inside(wrapper: nn.Module) -> nn.Module:
    """Return the model that is wrapped."""
    module = wrapper.module
    assert isinstance(module, nn.Module)
    return module


def _ranks_of(wrapper: Any) -> int:
    """Return over how many ranks it averages."""
    group = getattr(wrapper, "process_group", None) or getattr(wrapper, "_group", None)
    return 1 if group is None else int(group.size())


def _is_not_zero(grad: Tensor) -> Hash:
    """Return 1 for a gradient that is not zero everywhere, or that is not plain; 0 for zeros."""
    if not is_dense(grad):
        return 1
    return int(grad.any()) if grad.is_cpu else grad.any().long()
