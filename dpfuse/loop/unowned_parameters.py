"""Looks at the parameters that no optimizer steps on, for the rule of DPF-L04."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.optimizer_step_hook import living_optimizers
from dpfuse.engine.sample import Sample, are_comparable, sample_of, values_of
from dpfuse.engine.streams import HostCopy
from dpfuse.findings import findings
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.loop.watched_gradient import has_plain_class
from dpfuse.rules.codes import NEVER_STEPPED
from dpfuse.rules.l04_never_stepped import AVERAGES, BEGIN, LATER, is_left_out, text_of

__all__ = ["UnownedParameters"]

COMPARED = 16  # parameters


class UnownedParameters:
    """Notes which parameters optimizers step on, and looks at the rest once: in the first steps of a model.

    Another one looks again when a layer was added, or trains again that was frozen, if no optimizer had it by then.

    Of a parameter that other code updates, such as from a copy in float32, the weight changes. A parameter that the
    loss does not need has no gradient, or zeros.

    Args:
        record: of the model whose gradients are averaged.

    Attributes:
        decided: whether there is nothing more to see.
    """

    def __init__(self, record: TrainingRecord) -> None:
        self.decided = False
        self._record = record
        self._params: Mapping[str, Tensor] = {}  # known in the first step, as is what follows
        self._names: dict[int, str] = {}
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many each had when it was looked at
        self._owned: set[int] = set()  # ids of parameters of the model
        self._foreign: set[torch.dtype] = set()  # dtypes of other parameters that are stepped on
        self._first = 0  # how many averages there were when weights were copied
        self._samples: list[Sample] = []
        self._compared: Sequence[Tensor] = ()
        self._moving: HostCopy | None = None  # for each of them whether its gradient is more than zeros
        self._waits_for_step = False  # whether an optimizer may begin late with some of the rest

    def before_step(self, optimizer: Optimizer) -> None:
        """Note what it steps on; say what was found."""
        if not self._params:
            self._params = self._record.params()
            self._names = {id(param): name for name, param in self._params.items()}
        if self._groups.get(optimizer) != len(optimizer.param_groups):
            self._groups[optimizer] = len(optimizer.param_groups)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._owned |= {id(param) for param in params} & self._names.keys()
            self._foreign |= {param.dtype for param in params if id(param) not in self._names}
        if self._waits_for_step:
            if self._record.averages >= self._first + LATER:
                self._waits_for_step = False
                self._compare()
        elif self._moving is not None:
            self._say(self._moving)
        elif self._samples and self._record.averages >= self._first + AVERAGES:
            self._compare()
        elif self._record.averages >= BEGIN and not self._samples:
            self._begin()

    def misses(self, params: Iterable[Tensor]) -> bool:
        """Whether no optimizer that has stepped had one of these parameters."""
        return any(id(param) not in self._owned for param in params)

    def misses_names(self, names: Iterable[str]) -> bool:
        """Whether one of these parameters was not there."""
        return bool(self._params) and not self._params.keys() >= set(names)

    def _begin(self) -> None:
        self._first = self._record.averages
        rest = self._rest(self._params.values())
        self._compared = rest[:: max(1, len(rest) // COMPARED)][:COMPARED]
        self._samples = [*map(sample_of, self._compared)]
        self.decided = not rest

    def _may_step_later(self, rest: Iterable[Tensor]) -> bool:
        """Whether an optimizer has some of these parameters, which none has that has stepped. Looked for once.

        One that wraps another one has the parameters of that. Often it has no hooks, so its steps are not seen.
        """
        wanted = set(map(id, rest))
        groups = (group for each in living_optimizers() for group in each.param_groups)
        return any(id(param) in wanted for group in groups for param in group["params"])

    def _rest(self, params: Iterable[Tensor]) -> list[Tensor]:
        return [
            param
            for param in params
            if has_plain_class(param)
            and is_left_out(
                has_gradient=param.grad is not None and param.grad.layout is torch.strided,
                is_stepped=id(param) in self._owned,
                may_have_copy=param.dtype.itemsize <= 2 and torch.float32 in self._foreign,
            )
        ]

    def _compare(self) -> None:
        kept = self._rest(self._compared)
        samples = {id(param): sample for param, sample in zip(self._compared, self._samples, strict=True)}
        if not kept:
            self.decided = True
            return
        self._compared, self._samples = kept, [samples[id(param)] for param in kept]
        same = [same_values(sample, sample_of(param)) for param, sample in zip(kept, self._samples, strict=True)]
        moving = [param.grad.any() for param in kept if param.grad is not None]
        self._moving = HostCopy(torch.stack(same) & torch.stack(moving))

    def _say(self, moving: HostCopy) -> None:
        self.decided, self._moving = True, None
        rest = self._rest(self._params.values())
        if not all(moving.read()):
            return
        averages = self._record.averages - self._first
        if averages < LATER and (self._owned or self._may_step_later(rest)):
            self.decided, self._waits_for_step = False, True
            return
        names = [self._names[id(param)] for param in rest]
        nbytes = sum(param.numel() * param.element_size() for param in rest)
        stepped = [type(optimizer).__name__ for optimizer in self._groups]
        text = text_of(self._record.rank, averages, names, len(self._params), nbytes, stepped)
        findings.tell(NEVER_STEPPED, text, self._record.level)


def same_values(before: Sample, now: Sample) -> Tensor:
    """Return whether two samples are equal, [] bool, on their device, without waiting; False for a converted tensor."""
    values = values_of(now)
    if not are_comparable(before, now):
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return (values_of(before) == values).all()
