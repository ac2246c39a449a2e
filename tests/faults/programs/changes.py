"""Modules that change after they were wrapped, wrappers that are bypassed, copied, or called in unusual ways."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.faults.job import WIDTH, Job, Net, plain_loss


def param_replaced(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    job.plant()
    torch.manual_seed(1)
    model.module.layers[1] = nn.Linear(WIDTH, WIDTH)
    job.steps(model)


def param_replaced_one_rank(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    if job.rank == 1:
        job.plant()
        model.module.layers[1] = nn.Linear(WIDTH, WIDTH)
    job.steps(model)


def param_added(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    job.plant()
    torch.manual_seed(1)
    model.module.layers.append(nn.Linear(WIDTH, WIDTH))
    job.steps(model)


def module_converted(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    job.plant()
    model.double()
    job.steps(model)


def unfrozen_after_wrap(job: Job) -> None:
    net = Net()
    net.layers[1].requires_grad_(False)
    model = job.wrap(net)
    job.steps(model, 2)
    job.plant()
    net.layers[1].requires_grad_(True)
    job.steps(model)


def frozen_after_wrap(job: Job) -> None:
    model = job.wrap(Net())
    job.steps(model, 2)
    job.plant()
    model.module.layers[1].requires_grad_(False)
    job.steps(model)


def inner_module_called(job: Job) -> None:
    def run(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        return plain_loss(getattr(model, "module", model), x, rank)

    model = job.wrap(Net())
    job.step(model)
    job.plant()
    job.steps(model, run=run)


def two_backwards(job: Job) -> None:
    model = job.wrap(Net())
    for _ in range(12):
        truth = job.truth(model.module, micro_batches=2)
        model.zero_grad()
        losses = [plain_loss(model, job.batch(number=job.number + micro), job.rank) for micro in range(2)]
        for loss in losses:
            loss.backward()
        job.compare(model.module, truth)
        job.descend(model.module)


def no_sync_unused(job: Job) -> None:
    """Accumulation of 1 to 4 micro-batches, one layer unused in some of them."""
    model = job.wrap(Net(), find_unused_parameters=True)
    for count in (1, 2, 3, 4):

        def run(net: nn.Module, x: Tensor, rank: int) -> Tensor:
            return net(x, skip=[1] if (rank + int(x[0, 0] > 0)) % 2 else []).square().mean()

        truth = job.truth(model.module, run, micro_batches=count)
        model.zero_grad()
        for micro in range(count):
            with nullcontext() if micro == count - 1 else model.no_sync():
                run(model, job.batch(number=job.number + micro), job.rank).backward()
        job.compare(model.module, truth)
        job.descend(model.module)


def zeroed_to_none(job: Job) -> None:
    """Gradients that are dropped inside a window, and others that live through it."""
    model = job.wrap(Net(), gradient_as_bucket_view=True)
    for number in range(4):
        with model.no_sync():
            plain_loss(model, job.batch(number=100), job.rank).backward()
        for param in list(model.module.parameters())[number % 2 :: 2]:
            param.grad = None
        kept = [param for param in model.module.parameters() if param.grad is not None]
        for param in kept:
            param.grad.zero_()
        truth = job.truth(model.module)
        plain_loss(model, job.batch(), job.rank).backward()
        job.compare(model.module, truth)
        job.descend(model.module)


def deepcopy_wrapped(job: Job) -> None:
    model = job.wrap(Net())
    job.step(model)
    other = copy.deepcopy(model)
    job.steps(other)
    job.steps(model)


def pickle_wrapped(job: Job) -> None:
    model = job.wrap(Net())
    job.step(model)
    job.steps(pickle.loads(pickle.dumps(model)))


class Checkpointed(Net):
    """Computes each layer anew in the backward, which is a backward inside the backward if `reentrant`."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """`x` through the layers."""
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x.requires_grad_(), use_reentrant=self._reentrant))
        return x


def activation_checkpoint(job: Job) -> None:
    for reentrant in (False, True):
        model = job.wrap(Checkpointed(reentrant))
        for _ in range(3):
            # A reentrant backward knows no torch.autograd.grad, so the truth is that of the same net without.
            bare = Net()
            bare.load_state_dict(model.module.state_dict())
            truth = job.truth(bare)
            model.zero_grad()
            plain_loss(model, job.batch(), job.rank).backward()
            job.compare(model.module, truth)
            job.descend(model.module)
