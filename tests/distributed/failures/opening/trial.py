"""What one rank runs: steps of which one raises; and what must hold of what the ranks tell. Uses no process."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import dpfuse
from tests.distributed.failures.opening.lines import Passed, raising
from tests.distributed.failures.opening.programs import PROGRAMS, Program, batch

__all__ = ["Fault", "Step", "Told", "breaches", "trials"]

GOOD = 3  # steps without an error after which a rank ends
BAD = 4  # steps with an error, one after the other, after which it cannot go on
INTERRUPT = "KeyboardInterrupt"


@dataclass(frozen=True)
class Fault:
    """One backward that raises.

    Attributes:
        program: its name.
        rank, step: where, from step 1; the first one is recorded, the second has new buckets.
        place: which backward of the step.
        at: number of the line, from 1; None: nowhere, the lines are counted.
        error: its class.
        before: the number of the collective before which it raises, from 1, or not at all: the ranks may pass fewer
            lines before it than where they were counted. None: anywhere.
    """

    program: str
    rank: int
    step: int
    place: str = "backward"
    at: int | None = None
    error: str = "RuntimeError"
    before: int | None = None


@dataclass(frozen=True)
class Step:
    """How one step has ended on one rank: the number of its batch, and the error or the gradients."""

    number: int
    error: str = ""
    named: bool = False
    text: str = ""
    digest: str = ""
    grads: Any = None


@dataclass(frozen=True)
class Told:
    """What one rank tells: its steps from the one with the fault on, and the lines that it passed there."""

    steps: Sequence[Step]
    passed: Passed


def trials(rank: int, size: int, faults: Sequence[Fault]) -> list[Told]:
    """Run all of them on one group of ranks."""
    gc.collect()
    gc.disable()  # finalizers must not run, and be counted, within a backward
    try:
        return [_trial(rank, fault) for fault in faults]
    finally:
        gc.enable()


def _trial(rank: int, fault: Fault) -> Told:
    program = PROGRAMS[fault.program]
    model = program.wrapped()
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1) if program.sharded else None
    passed, steps = Passed(), []
    number = good = bad = 0
    while good < GOOD and bad < BAD:
        number += 1
        here = number == fault.step and (rank == fault.rank or fault.at is None)
        raised = _step(program, model, optimizer, rank, number, fault if here else None, passed)
        if number >= fault.step:
            steps.append(raised)
            good, bad = good + (not raised.error), bad + 1 if raised.error else 0
        if raised.error and program.retries and here:
            again = _step(program, model, optimizer, rank, number, None, passed)
            steps.append(again)
            good += not again.error
    return Told(steps, passed)


def _step(
    program: Program,
    model: Any,
    optimizer: Any,
    rank: int,
    number: int,
    fault: Fault | None,
    passed: Passed,
) -> Step:
    def armed(place: str) -> AbstractContextManager[object]:
        if fault is None or fault.place != place:
            return nullcontext()
        return raising(passed, fault.at, fault.error, fault.before)

    try:
        model.zero_grad()
        program.run(model, batch(rank, number), armed)
        if optimizer is not None:
            optimizer.step()
    except BaseException as error:
        return Step(number, type(error).__name__, isinstance(error, dpfuse.DPFuseError), str(error))
    values = [param if optimizer is not None else param.grad for param in model.module.parameters()]
    digest = hashlib.sha256(b"".join(_bytes(each) for each in values)).hexdigest()[:12]
    return Step(number, digest=digest, grads=[None if v is None else v.detach().clone() for v in values])


def _bytes(value: Any) -> bytes:
    return b"none" if value is None else value.detach().contiguous().numpy().tobytes()


def breaches(fault: Fault, told: Sequence[Told]) -> list[str]:
    """What does not hold; empty if all is well.

    Every step that succeeds gives all ranks the same gradients: the mean. And if the ranks pair up other batches from
    then on, each of them has had an error that names a rank.
    """
    found = []
    good = [[step for step in each.steps if not step.error] for each in told]
    errors = [[step for step in each.steps if step.error] for each in told]
    passed = told[fault.rank].passed
    # The group, for every rank: an interrupt of the vote that follows the first backward ends it, too.
    may_end = passed.raised and (passed.exchanging[-1] or (passed.collectives[-1] > 0 and fault.error == INTERRUPT))
    ends = may_end and not any(good)
    if any(len(each) < GOOD for each in good) and not ends:
        found.append("a rank cannot go on")
    for number, pair in enumerate(zip(*good, strict=False)):
        if len({step.digest for step in pair}) > 1:
            found.append(f"different gradients in good step {number}")
        found += _wrong(fault, pair)
    named = [[step for step in each if step.named and "rank" in step.text] for each in errors]
    for rank, each in enumerate(errors):
        own = [step for step in each if "planted" in step.text] if rank == fault.rank else []
        found += [f"rank {rank}: unnamed {s.error}: {s.text[:90]}" for s in each if s not in named[rank] + own]
        if len(each) > (2 if rank == fault.rank else 1) and not ends:
            found.append(f"rank {rank}: {len(each)} errors")
    shifted = any(len({step.number for step in pair}) > 1 for pair in zip(*good, strict=False))
    if shifted and fault.place != "local" and not all(named):
        found.append("one rank goes on")
    return found


def _wrong(fault: Fault, pair: Sequence[Step]) -> list[str]:
    program = PROGRAMS[fault.program]
    if program.sharded:
        return []
    sums: list[Any] = []
    for rank, step in enumerate(pair):
        torch.manual_seed(0)
        bare = _Bare(program.build())
        program.run(bare, batch(rank, step.number), lambda place: nullcontext())
        grads = [param.grad for param in bare.module.parameters()]
        sums = grads if not sums else [_added(*both) for both in zip(sums, grads, strict=True)]
    found = []
    for got, total in zip(pair[0].grads, sums, strict=True):
        if (got is None) != (total is None) or (
            got is not None and not torch.allclose(got, total / len(pair), atol=1e-6)
        ):
            found.append(f"wrong mean of batches {[step.number for step in pair]}")
            break
    return found


def _added(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other


class _Bare:
    def __init__(self, module: Any) -> None:
        self.module = module
        self.zero_grad = module.zero_grad
        self.no_sync = nullcontext

    def __call__(self, x: Any) -> Any:
        return self.module(x)
