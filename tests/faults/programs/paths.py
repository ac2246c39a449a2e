"""Ranks that take different paths through a training."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from tests.faults.job import WIDTH, Job, Net, plain_loss


def without_layer_on(ranks: tuple[int, ...]) -> Any:
    def run(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        return model(x, skip=[2] if rank in ranks else []).square().mean()

    return run


def unused_one_rank(job: Job) -> None:
    job.steps(job.wrap(Net()), run=without_layer_on((1,)))


def unused_everywhere(job: Job) -> None:
    job.steps(job.wrap(Net()), run=without_layer_on((0, 1)))


def unused_now_and_then(job: Job) -> None:
    model = job.wrap(Net())
    for number in range(14):
        job.step(model, run=without_layer_on((number % 2,)) if number else plain_loss)


def no_sync_one_rank(job: Job) -> None:
    model = job.wrap(Net())
    for number in range(14):
        if number == 2 and job.rank == 1:
            job.plant()
            with model.no_sync():
                plain_loss(model, job.batch(), 1).backward()
            job.number += 1
        else:
            job.step(model)


def windows(job: Job, model: Any, micro_batches: int, count: int) -> None:
    """Steps of two micro-batches, of which this rank does `micro_batches`."""
    for _ in range(count):
        truth = job.truth(model.module, micro_batches=2)
        model.zero_grad()
        for micro in range(micro_batches):
            with nullcontext() if micro == micro_batches - 1 else model.no_sync():
                plain_loss(model, job.batch(number=job.number + micro), job.rank).backward()
        job.compare(model.module, truth)
        job.number += 1
        job.descend(model.module)


def accumulation(job: Job) -> None:
    windows(job, job.wrap(Net()), 2, 3)


def skipped_micro_batch(job: Job) -> None:
    model = job.wrap(Net())
    windows(job, model, 2, 2)
    job.plant()
    windows(job, model, 1 if job.rank == 1 else 2, 12)


def skipped_backward(job: Job) -> None:
    model = job.wrap(Net())
    for number in range(14):
        if number == 2 and job.rank == 1:
            job.plant()
            plain_loss(model, job.batch(), 1)  # its loss is not liked, so no backward
            job.number += 1
        else:
            job.step(model)


def exception_caught(job: Job) -> None:
    model = job.wrap(Net())
    for number in range(14):
        if number == 2 and job.rank == 1:
            job.plant()
            with suppress(RuntimeError):
                plain_loss(model, job.batch()[:, :-1], 1)
        else:  # rank 1 has one fewer
            job.step(model)


def wrappers_swapped(job: Job) -> None:
    models = [job.wrap(Net()), job.wrap(Net())]
    for model in models:
        job.step(model)
    job.plant()
    for _ in range(12):
        for model in models[::-1] if job.rank == 1 else models:
            job.step(model)


def uneven_steps(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    job.plant()
    if job.rank == 0:
        job.step(model)
    dist.barrier()


def exception_exit(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    if job.rank == 1:
        job.plant()
        raise ValueError("planted")
    job.steps(model)


class Blow(torch.autograd.Function):
    """The identity; in the backward of rank 1 it does what `how` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, job: Job, how: Any) -> Tensor:
        ctx.job, ctx.how = job, how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.job.rank == 1 and ctx.job.number == 2 and ctx.how is not None:
            ctx.job.plant()
            ctx.how()
        return grad, None, None


class Fused(nn.Module):
    """A net with a `Blow` in its middle."""

    def __init__(self, job: Job, how: Any) -> None:
        super().__init__()
        self.front, self.back = Net(2), Net(2)
        self._blow = (job, how)

    def __deepcopy__(self, memo: Any) -> nn.Module:  # the truth is computed on copies, which do no harm
        copy = Fused(self._blow[0], None)
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, x: Tensor) -> Tensor:
        """`x` through both halves."""
        return self.back(Blow.apply(self.front(x), *self._blow))


def exception_mid_backward_caught(job: Job) -> None:
    def blow() -> None:
        raise KeyError("planted")

    model = job.wrap(Fused(job, blow))
    for _ in range(14):
        try:
            job.step(model)
        except (KeyError, dpfuse.DPFuseError):
            job.number += 1


def kill_mid_backward(job: Job) -> None:
    job.steps(job.wrap(Fused(job, lambda: os.kill(os.getpid(), signal.SIGKILL))), 5)


def freeze_rank(job: Job) -> None:
    job.steps(job.wrap(Fused(job, lambda: os.kill(os.getpid(), signal.SIGSTOP))), 5)


def user_collectives(job: Job) -> None:
    model = job.wrap(Net())
    for _ in range(3):
        job.step(model)
        total = torch.ones(WIDTH)
        work = dist.all_reduce(total, async_op=True)
        job.step(model)
        work.wait()
        job.tell(same=total.tolist())
