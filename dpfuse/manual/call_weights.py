"""Compares the weights whose gradients a user averages by hand: a hash travels in the vote of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dpfuse.engine.backward_table import IDLE
from dpfuse.engine.events import Watcher, hear_steps
from dpfuse.engine.report import Compared
from dpfuse.errors import WeightsWarning
from dpfuse.rules.w01_weights_differ import Phrases
from dpfuse.weights.check import WeightsCheck
from dpfuse_kernels.bit_hash import BITS

__all__ = ["DUE", "CallWeights"]

HASHED, DUE = 1 << BITS, 2 << BITS  # of what a rank says: whether it has one, and whether it is to be examined

UNCHANGED: Any = SimpleNamespace(looks=0)  # the parameters of a call stay the same
WORDS = Phrases(
    "the call of fused_allreduce_gradients()",
    "send the weights of one rank to all, as torch.distributed.broadcast does",
)


class CallWeights(Watcher):
    """The weights of a call, by name, at least one: compared from the second call with the same parameters on.

    Made on all ranks in the same call. A difference is a warning: no option of the call says what else it should be.
    Between calls it refers to no parameter, not even weakly, since torch refuses to swap a tensor that has a weak
    reference. In a step it finds them in the optimizers. A parameter that no optimizer holds is not compared.
    """

    def __init__(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        device = next(iter(tensors.values())).device
        self._pairs = torch.zeros((BITS, 2), device=device)
        self._compared = Compared(self._pairs, late=False)  # a vote is read in the call that makes it
        # What the comparison asks of an engine.
        self._calls: Any = SimpleNamespace(completed=0, reducer=SimpleNamespace(state=IDLE), without_inputs=False)
        self._living: dict[int, Tensor] = {}  # the parameters by id, while something is done with them
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # those that step some of them
        made_of = dict(tensors)
        self._check = WeightsCheck(lambda: made_of, UNCHANGED, group, level="warn", words=WORDS, hold=self._hold)
        self._check.compare_in(self._compared, self._calls)
        self._check.prepare()
        made_of.clear()
        self._ids = set(map(id, tensors.values()))
        hear_steps(self)

    def _hold(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        return partial(self._living.get, id(tensor))

    @contextmanager
    def _in(self, params: Iterable[Tensor]) -> Iterator[None]:
        self._living.update((key, param) for param in params if (key := id(param)) in self._ids)
        try:
            yield
        finally:
            self._living.clear()

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`: hash the parameters that the optimizers hold."""
        if not self._ids.isdisjoint(map(id, _params_of(optimizer))):
            self._optimizers.add(optimizer)
            with self._in(param for each in self._optimizers for param in _params_of(each)):
                self._check.after_step(optimizer)

    def number(self) -> int:
        """Return what this rank says in the vote: the hash that the last step has written, if any. Waits for it."""
        pairs = self._pairs.tolist()
        found = sum(int(one) << place for place, (one, _) in enumerate(pairs))
        return found | any(pairs[0]) * HASHED | self._check.is_expected * DUE

    def compared(self, numbers: Sequence[int], params: Iterable[Tensor]) -> None:
        """Take what each rank has said in the vote of this call, before gradients are averaged.

        What an earlier call has seen to differ is examined now: on every rank, if one has said so.
        """
        due = False
        try:
            due = any(number & DUE for number in numbers)
            hashes = {number % DUE for number in numbers if number & HASHED}
            self._compared.differs = len(hashes) > 1
        except Exception as error:
            self._fail(error)
        if due:
            with self._in(params):
                self._check.examine()

    def averaged(self) -> None:
        """Count the call, whose gradients are averaged on every rank. Warns of weights that differ."""
        try:
            self._calls.completed += 1
            self._check.delivered()
        except WeightsWarning:  # where the user has made warnings errors
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the comparison on this rank: gradients are averaged all the same, as on the others."""
        self._check.turn_off(f"comparing them has failed: {type(error).__name__}: {error}")


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
