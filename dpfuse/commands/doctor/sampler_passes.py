"""Counts the passes of the training over samplers that shuffle, and gives the time of loaders to the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.utils.data import DataLoader, DistributedSampler

from dpfuse.commands.doctor.replaced_function import replace
from dpfuse.engine.torch_private import LOADER_ITERATOR
from dpfuse.trace.tracer import Tracer

__all__ = ["SamplerPasses"]

LOADER: Any = DataLoader
SAMPLER: Any = DistributedSampler


@dataclass
class _Sampler:
    """How a sampler is used.

    Args:
        sampler: torch's.
        is_set: whether its `set_epoch` was called.
        epochs: that it had in passes from which the training got its batches.
    """

    sampler: ref[Any]
    is_set: bool = False
    epochs: list[int] = field(default_factory=list)


@dataclass
class _Pass:
    """One pass over a sampler.

    Args:
        sampler: is told of the pass once it counts.
        epoch: that the sampler has.
        steps: that came directly after one of its batches. The second one counts the pass. One may have its batch from
            before: a program may fetch the next batch of its training, and then validate.
    """

    sampler: _Sampler
    epoch: int
    steps: int = 0

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        if self.steps == 2:
            self.sampler.epochs.append(self.epoch)


class SamplerPasses:
    """Hears the loaders and samplers of torch from now on.

    Args:
        tracer: returns the trace; None before a model is wrapped.
    """

    def __init__(self, tracer: Callable[[], Tracer | None]) -> None:
        self._tracer = tracer
        self._samplers: list[_Sampler] = []
        self._passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()  # by the iterator of a loader
        self._fed: _Pass | None = None  # the pass of the last batch
        if LOADER_ITERATOR is not None:
            replace(LOADER_ITERATOR, "__next__", self._next)
            replace(LOADER, "__iter__", self._iter)
            replace(SAMPLER, "set_epoch", self._set_epoch)

    def step(self) -> None:
        """Count a step of the training."""
        if self._fed is not None:
            self._fed.step()
            self._fed = None  # a step counts only directly after a batch

    def found(self) -> list[dict[str, Any]]:
        """Return, for each sampler, the epochs of its passes, and whether they were set."""
        return [{"epochs": one.epochs, "set": one.is_set} for one in self._samplers]

    def _next(self, plain: Any, iterator: Any) -> Any:
        tracer = self._tracer()
        if tracer is None:
            return plain(iterator)
        with tracer.phases.inside("loader"):
            batch = plain(iterator)
        self._fed = self._passes.get(iterator)
        return batch

    def _iter(self, plain: Any, loader: Any) -> Any:
        iterator = plain(loader)  # the same one in each pass where workers are persistent
        for sampler in (getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None)):
            if isinstance(sampler, SAMPLER) and sampler.shuffle and sampler.num_replicas > 1:
                self._passes[iterator] = _Pass(self._known(sampler), sampler.epoch)
        return iterator

    def _set_epoch(self, plain: Any, sampler: Any, epoch: int) -> None:
        self._known(sampler).is_set = True
        plain(sampler, epoch)

    def _known(self, sampler: Any) -> _Sampler:
        for one in self._samplers:
            if one.sampler() is sampler:
                return one
        self._samplers.append(_Sampler(ref(sampler)))
        return self._samplers[-1]
