"""Compares the weights whose gradients a user averages by hand: a hash travels in the vote of each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm.votes import NO_NUMBER
from dpfuse.engine.optimizer_step_hook import call_after_steps
from dpfuse.engine.reducer import IDLE, Phase
from dpfuse.engine.window import Window
from dpfuse.weights.check import WeightsCheck
from dpfuse.weights.finding import Words

__all__ = ["CallWeights"]

BITS = 32  # of a hash

WORDS = Words(
    "the call of fused_allreduce_gradients()",
    "send the weights of one rank to all, as torch.distributed.broadcast does",
)


class CallWeights:
    """The weights of a call, which are compared from the second call with the same parameters on.

    Made on all ranks in the same call. A difference is a warning: no option of the call says what else it should be.

    Args:
        tensors: returns the parameters, by name; at least one of them.
        group: the ranks.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], group: dist.ProcessGroup) -> None:
        device = next(iter(tensors().values())).device
        self._pairs = torch.zeros((BITS, 2), device=device)
        self._calls = calls = _Calls(self._pairs)
        self._check = WeightsCheck(tensors, lambda: 0, group, lambda: calls, Window(), raises=False, words=WORDS)
        self._check.compare_in(calls)
        call_after_steps(self._check)

    def hash(self) -> int:
        """Return the hash that the last step has written, below 2**32; `NO_NUMBER` if there is none. Waits for it."""
        pairs = self._pairs.tolist()
        if not any(pairs[0]):
            return NO_NUMBER
        return sum(int(one) << place for place, (one, _) in enumerate(pairs))

    def compared(self, hashes: Sequence[int]) -> None:
        """Take the hashes of the ranks that have one, of this call, before gradients are averaged.

        What an earlier call has seen to differ is examined now: on every rank, since all have seen the same.
        """
        self._calls.differs = len(set(hashes)) > 1
        if self._check.due:
            self._check.examine()

    def averaged(self) -> None:
        """Count the call, whose gradients are averaged on every rank. Warns of weights that differ."""
        self._calls.completed += 1
        self._check.delivered()


class _Calls:
    """What `WeightsCheck` wants of a reducer and of a report.

    Args:
        number: of a hash, each bit as a pair, [32, 2].
    """

    phase: Phase = IDLE
    is_on_cpu = True  # a vote is read in the call that makes it

    def __init__(self, number: Tensor) -> None:
        self.number: Tensor | None = number
        self.completed = 0
        self.differs = False
