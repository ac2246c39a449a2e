"""What one rank runs: steps of which one fails, and those that follow; and what it tells of them."""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

import dpfuse
from tests.distributed.failures.opening.fault import DUMMY, REPEAT, SKIP, SKIP_OOM, Fault
from tests.distributed.failures.opening.lines import Passed
from tests.distributed.failures.opening.oracle import Bits, bits_of
from tests.distributed.failures.opening.planter import Planter, is_planted
from tests.distributed.failures.opening.programs import LR, PROGRAMS, Halting, Pass, Program
from tests.patience import patience

__all__ = ["APART", "DONE", "ENDED", "STUCK", "Attempt", "Told", "told_in", "trial"]

DONE = "done"  # all batches were taken
APART = "apart"  # an error has said that the weights of the ranks differ
ENDED = "ended"  # an exception has ended the program
STUCK = "stuck"  # every attempt raises
LATE = 3.0  # seconds after which a rank has ended that its peers still wait for
HOPELESS = 3  # attempts with an error, one after the other, after which a rank is stuck
# What an error says where one rank has not stepped as the others have. A ShardedOptimizer has words of its own.
WEIGHTS_DIFFER = re.compile(r"has not used the mean|has failed to update its part")


@dataclass(frozen=True)
class Attempt:
    """How one attempt at a batch has ended on one rank.

    Attributes:
        number: of the batch.
        error: the class of the exception that has ended it; empty for none.
        text: of the exception.
        named: whether it is a DPFuseError.
        out_of_memory: whether it is a torch.OutOfMemoryError.
        planted: whether the program has seen the planted exception.
        dummy: the part of the step in which a dummy was in the place of the batch.
        before: the weights before the step.
        mean: the averaged gradients.
    """

    number: int
    error: str = ""
    text: str = ""
    named: bool = False
    out_of_memory: bool = False
    planted: bool = False
    dummy: str = ""
    before: Bits = ()
    mean: Bits = ()


@dataclass
class Told:
    """What one rank tells.

    Attributes:
        attempts: from the step with the failure on, and each before that raised.
        passed: up to the failure.
        end: DONE, APART, ENDED or STUCK; empty if the rank was ended from outside.
        weights: at the end.
    """

    attempts: list[Attempt] = field(default_factory=list)
    passed: Passed = field(default_factory=Passed)
    end: str = ""
    weights: Bits = ()


def trial(rank: int, size: int, folder: str, fault: Fault) -> None:
    """Train, fail in one step if this is the rank, and go on as the policy says.

    What came of it goes to a file in the folder, and so does what the process prints.
    """
    printed = os.open(Path(folder, f"{rank}.printed"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 2)
    os.close(printed)
    gc.collect()
    gc.disable()  # finalizers must not run, and be counted, within a backward
    try:
        _Trial(rank, size, fault, Path(folder, f"{rank}.told")).run()
    finally:
        gc.enable()


def told_in(folder: str, rank: int) -> Told:
    """Return what a rank has told so far."""
    path = Path(folder, f"{rank}.told")
    if not path.exists():
        return Told()
    told: Told = pickle.loads(path.read_bytes())
    return told


class _Trial:
    def __init__(self, rank: int, size: int, fault: Fault, path: Path) -> None:
        self.rank, self.size, self.fault, self.path = rank, size, fault, path
        self.program: Program = PROGRAMS[fault.program]
        own = fault if fault.at is None and fault.kind in ("line", "around") else fault.of(rank)
        self.planter = Planter(own)
        self.model = self.program.wrapped()
        self.planter.prepare(self.model.module, {each.kind for each in (fault, fault.also) if each is not None})
        self.optimizer = (
            dpfuse.ShardedOptimizer(self.model, Halting, lr=LR)
            if self.program.sharded
            else Halting(self.model.parameters(), lr=LR)
        )
        self.told = Told(passed=self.planter.passed)

    def run(self) -> None:
        fault, told = self.fault, self.told
        number, bad = 1, 0
        while not told.end:
            self.planter.active = number == fault.step and not told.attempts
            attempt, error = self._attempt(number)
            if number >= fault.step or error is not None:
                told.attempts.append(attempt)
            bad = 0 if error is None else bad + 1
            if error is None or fault.policy in (SKIP, SKIP_OOM):
                number += 1
            if error is not None:
                told.end = self._end_after(error, bad)
            elif number > fault.step + fault.after:
                told.end = DONE
                told.weights = self._weights()
            error = None  # its frames keep tensors
            self.path.write_bytes(pickle.dumps(told))
        self._leave()

    def _leave(self) -> None:
        """Wait for the peers. If one still waits for this rank, end, as a process does that has no more to do."""
        if self.told.end == ENDED:
            os._exit(1)
        ends = [self.path.with_name(f"{rank}.end") for rank in range(self.size)]
        ends[self.rank].touch()
        deadline = monotonic() + patience(LATE)
        while not all(end.exists() for end in ends):
            if monotonic() > deadline:
                os._exit(1)
            sleep(0.002)

    def _end_after(self, error: BaseException, bad: int) -> str:
        if isinstance(error, dpfuse.DPFuseError) and WEIGHTS_DIFFER.search(str(error)):
            return APART
        if self.fault.policy == SKIP_OOM and not isinstance(error, torch.OutOfMemoryError):
            return ENDED
        return STUCK if bad == HOPELESS else ""

    def _attempt(self, number: int) -> tuple[Attempt, BaseException | None]:
        before = self._weights()
        one = _Armed(self, number)
        try:
            self.model.zero_grad()
            self.program.step(one)
            mean = () if self.program.sharded else bits_of([param.grad for param in self.model.module.parameters()])
            with self.planter.around("averaged", "step"):
                self.optimizer.step()
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
            named, memory = isinstance(error, dpfuse.DPFuseError), isinstance(error, torch.OutOfMemoryError)
            return Attempt(number, kind, text, named, memory, is_planted(error), one.dummy, before), error
        if self.program.sharded:  # its gradients are in parts
            params = zip(self.model.module.parameters(), self._tensors(before), strict=True)
            mean = bits_of([(was - param.detach()) / LR for param, was in params])
        return Attempt(number, planted=one.planted, dummy=one.dummy, before=before, mean=mean), None

    def _weights(self) -> Bits:
        return bits_of([*self.model.module.parameters()])

    def _tensors(self, bits: Bits) -> Sequence[Tensor]:
        shapes = [param.shape for param in self.model.module.parameters()]
        pairs = zip(bits, shapes, strict=True)
        return [torch.frombuffer(bytearray(each or b""), dtype=torch.float32).view(shape) for each, shape in pairs]


class _Armed(Pass):
    """A pass in which this rank may fail. A forward that has failed is tried again, if that is the policy."""

    def __init__(self, trial: _Trial, number: int) -> None:
        super().__init__(trial.model, trial.rank, trial.size, number)
        self.planted = False
        self._trial = trial

    def forward(self, x: Tensor, part: str) -> Tensor:
        planter, policy = self._trial.planter, self._trial.fault.policy
        try:
            with planter.around(part, "forward"):
                return planter.on_the_way(super().forward(x, part))
        except BaseException as error:
            if policy not in (REPEAT, DUMMY) or not is_planted(error):
                raise
        self.planted = True
        self.dummy = part if policy == DUMMY else ""
        return planter.on_the_way(super().forward(x, part))

    def backward(self, loss: Any, part: str, **how: bool) -> None:
        with self._trial.planter.around(part, "backward"):
            super().backward(loss, part, **how)
