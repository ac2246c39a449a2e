"""What one rank runs: some right steps, one in which a rank fails, and two more; and what it reports of them."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

import dpfuse
from tests.distributed.failures.injected.cases import CASES, STALL, inputs
from tests.distributed.failures.injected.faults import TEXT, Point, Record, failing

__all__ = ["Fault", "Report", "Step", "steps_of", "trial", "words_of"]

AFTER = 2  # steps that follow the one in which a rank fails
ATTEMPTS = 3  # at each of them: a rank repeats a step that raised, as the errors say


@dataclass(frozen=True)
class Fault:
    """One failure.

    Attributes:
        case: name of the case.
        step: the synchronised backward in which it happens, from 1.
        rank: where.
        kind: one of `KINDS`.
        at: number of the point, from 1; None: nowhere, the points are counted on all ranks.
        error: name of what is raised.
    """

    case: str
    step: int
    rank: int
    kind: str = "line"
    at: int | None = None
    error: str = "RuntimeError"


@dataclass(frozen=True)
class Step:
    """How one step ended on one rank.

    Attributes:
        stage: what raised, "local", "forward" or "backward"; empty: nothing did.
        error: the class of what was raised.
        named: whether it is a DPFuseError.
        text: its text.
        chained: whether it is the injected exception, or that is among its causes.
        digest: of the bits of all gradients.
        off: the largest error of a gradient, as a part of its largest element.
    """

    stage: str = ""
    error: str = ""
    named: bool = False
    text: str = ""
    chained: bool = False
    digest: str = ""
    off: float = 0.0


@dataclass(frozen=True)
class Report:
    """What one rank tells of a trial.

    Attributes:
        points: those that were passed in the step that was to fail; only the last where a fault was to happen.
        raised: whether the fault has raised.
        steps: per step, from the one with the fault on, how each attempt at it ended; no more after one that never
            succeeded.
    """

    points: Sequence[Point]
    raised: bool
    steps: Sequence[Sequence[Step]]


_frozen = False


def trial(rank: int, size: int, fault: Fault, folder: str) -> Report:
    """Train, fail in one step if this is the rank, and repeat each step that raised, as a patient program would.

    What the process prints goes to a file in `folder`, and so does the end of each attempt, at once.
    """
    global _frozen
    printed = os.open(words_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 2)
    os.close(printed)
    if not _frozen:
        # Nothing of the process is looked at again, so that a collection takes a millisecond.
        gc.collect()
        gc.freeze()
        _frozen = True
    gc.disable()  # finalizers of other trials must not run, and be counted, within a backward
    try:
        with open(steps_of(folder, rank), "w") as file:
            return _trial(rank, size, fault, lambda step: print(json.dumps(asdict(step)), file=file, flush=True))
    finally:
        gc.enable()
        gc.collect()


def words_of(folder: str, rank: int) -> str:
    """Where a rank prints."""
    return f"{folder}/{rank}.words"


def steps_of(folder: str, rank: int) -> str:
    """Where a rank tells how its attempts ended, a line for each."""
    return f"{folder}/{rank}.steps"


def _trial(rank: int, size: int, fault: Fault, tell: Callable[[Step], None]) -> Report:
    case = CASES[fault.case]
    trained = _Trained(fault.case, rank, size)
    for step in range(1, fault.step):
        ended = trained.step(step)
        assert not ended.stage, f"step {step}, before the fault: {ended.text}"
        assert ended.off <= case.tolerance
    record = Record()
    steps = []
    for step in range(fault.step, fault.step + 1 + AFTER):
        here = step == fault.step and (rank == fault.rank or fault.at is None)
        attempts = [trained.step(step, fault, record) if here else trained.step(step)]
        tell(attempts[0])
        while attempts[-1].stage and len(attempts) < ATTEMPTS:
            attempts.append(trained.step(step))
            tell(attempts[-1])
        steps.append(attempts)
        if attempts[-1].stage:
            break
    return Report(record.points if fault.at is None else record.points[-1:], record.raised, steps)


class _Trained:
    """A module on one rank, and what its gradients ought to be."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self._name = name
        self._case = case = CASES[name]
        self._rank = rank
        self._size = size
        self._module = case.build()
        _tell_rank(self._module, rank)
        if not case.manual:
            self._wrapped = dpfuse.DataParallel(self._module, stall_timeout=STALL, **case.options)

    def step(self, step: int, fault: Fault | None = None, record: Record | None = None) -> Step:
        """Zero the gradients and run one step, in which the fault happens where there is one."""
        case, stage = self._case, "local"
        armed: AbstractContextManager[object] = nullcontext()
        if fault is not None and record is not None:
            armed = failing(record, fault.kind, fault.at, fault.error)
        try:
            if case.manual:
                self._module.zero_grad()
                _loss(self._module, step, 0, self._rank).backward()
                stage = "backward"
                with armed:
                    dpfuse.fused_allreduce_gradients(self._module.parameters(), **case.options)
                return self._landed(step)
            self._wrapped.zero_grad()
            if case.window:
                with self._wrapped.no_sync():
                    loss = _loss(self._wrapped, step, 0, self._rank)
                    with armed if case.local else nullcontext():
                        loss.backward()
            stage = "forward"
            loss = _loss(self._wrapped, step, 1, self._rank)
            stage = "backward"
            with nullcontext() if case.local else armed:
                loss.backward()
            return self._landed(step)
        except Exception as error:
            named = isinstance(error, dpfuse.DPFuseError)
            return Step(stage, type(error).__name__, named, str(error), _is_chained(error))

    def _landed(self, step: int) -> Step:
        grads = [param.grad for param in self._module.parameters()]
        off, digest = 0.0, hashlib.sha256()
        for grad, mean in zip(grads, _means(self._name, self._size, step), strict=True):
            digest.update(b"none" if grad is None else grad.detach().contiguous().numpy().tobytes())
            if (grad is None) != (mean is None):
                off = float("inf")
            elif grad is not None and mean is not None:
                error = ((grad - mean).abs().max() / mean.abs().max().clamp(min=1e-12)).item()
                off = max(off, error if error == error else float("inf"))
        return Step(digest=digest.hexdigest()[:16], off=off)


def _loss(module: nn.Module, step: int, batch: int, rank: int) -> Tensor:
    loss: Tensor = module(inputs(step, batch, rank)).square().mean()
    return loss


def _tell_rank(module: nn.Module, rank: int) -> None:
    if hasattr(module, "rank"):
        module.rank = rank


@lru_cache(maxsize=64)
def _means(name: str, size: int, step: int) -> list[Tensor | None]:
    """What the gradients of a step ought to be, from each rank's own backward of a bare module."""
    case = CASES[name]
    torch.manual_seed(0)
    module = case.build()
    sums: list[Tensor | None] = [None] * len(list(module.parameters()))
    for rank in range(size):
        bare = copy.deepcopy(module)
        _tell_rank(bare, rank)
        batches = (0,) if case.manual else (0, 1) if case.window else (1,)
        for batch in batches:
            _loss(bare, step, batch, rank).backward()
        for place, param in enumerate(bare.parameters()):
            if param.grad is not None:
                known = sums[place]
                sums[place] = param.grad.double() if known is None else known + param.grad
    return [None if total is None else (total / size).float() for total in sums]


def _is_chained(error: BaseException | None) -> bool:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if TEXT in str(error):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
