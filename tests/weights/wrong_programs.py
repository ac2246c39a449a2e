"""Programs whose weights leave each other for good. Each must be told of on every rank, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import dpfuse
from tests.weights.right_programs import STEPS, Holder, batches, deep_network, loss_of, network, train

__all__ = ["PROGRAMS"]

Program = Callable[[int, int], Any]
PROGRAMS: dict[str, Program] = {}


def wrong(program: Program) -> Program:
    """Add a program to the list, under its name."""
    PROGRAMS[program.__name__.replace("_", " ")] = program
    return program


def meta_learning(rank: int, *, restores: bool, edits: bool) -> None:
    """First-order MAML, which may forget to take its inner steps back, or edit a weight on one rank."""
    model = dpfuse.DistributedDataParallel(network())
    outer = SGD(model.parameters(), lr=0.05)
    for step, inputs in enumerate(batches(rank, STEPS)):
        kept = [param.detach().clone() for param in model.parameters()]
        inner = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with model.no_sync():
                inner.zero_grad()
                loss_of(model(inputs)).backward()
            inner.step()
        outer.zero_grad()
        loss_of(model(inputs + 1)).backward()
        if restores:
            torch._foreach_copy_([param.data for param in model.parameters()], kept)
        outer.step()
        if edits and step == 9 and rank == size_of(model) - 1:
            model.module[0].weight.data[1, 2] += 0.5


def size_of(model: dpfuse.DistributedDataParallel) -> int:
    return model.process_group.size()


@wrong
def inner_steps_that_are_not_taken_back(rank: int, size: int) -> None:
    meta_learning(rank, restores=False, edits=False)


@wrong
def an_edit_between_inner_steps_that_are_taken_back(rank: int, size: int) -> None:
    meta_learning(rank, restores=True, edits=True)


@wrong
def an_edit_behind_epochs_of_uneven_length(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(deep_network())
    optimizer = SGD(model.parameters(), lr=0.05)
    for _ in range(6):
        with model.join():
            train(model, optimizer, rank, 20 + 5 * rank)
    if rank == 1:
        model.module[7].weight.data[3, 3] += 0.5
    train(model, optimizer, rank, 64)


@wrong
def moments_of_adam_behind_uneven_epochs(rank: int, size: int) -> None:
    """join() sends the weights of the last rank. Its optimizer has made more steps, which stay with it."""
    model = dpfuse.DistributedDataParallel(deep_network())
    optimizer = Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        with model.join():
            train(model, optimizer, rank, 64 + 5 * rank)


@wrong
def an_edit_beside_a_frozen_module_of_one_rank(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(Holder())
    optimizer = SGD(model.parameters(), lr=0.05)
    train(model, optimizer, rank, 20)
    if rank == 0:
        model.module.metric = nn.Linear(3, 3).requires_grad_(False)
        model.module.net[2].weight.data[0, 0] += 0.5
    train(model, optimizer, rank, 64)


@wrong
def an_adapter_that_each_rank_initialises_again(rank: int, size: int) -> None:
    """All ranks add it, and one initialises it again when it loads something else."""
    model = dpfuse.DistributedDataParallel(Holder())
    model.module.net.requires_grad_(False)
    torch.manual_seed(1)
    model.module.adapter = nn.Linear(6, 2)
    optimizer = AdamW(model.module.adapter.parameters())
    train(model, optimizer, rank, 20)
    if rank == 0:
        model.module.adapter.reset_parameters()
    train(model, optimizer, rank, 64)


@wrong
def an_optimizer_for_each_parameter_inside_backward(rank: int, size: int) -> None:
    """torch's tutorial on saving memory: the hooks of this rank's gradients come before their average."""
    model = dpfuse.DistributedDataParallel(network())
    optimizers = {param: SGD([param], lr=0.01) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    for inputs in batches(rank, STEPS):
        loss_of(model(inputs)).backward()
        model.zero_grad()


@wrong
def galore_with_a_schedule_for_each_layer(rank: int, size: int) -> None:
    """The hook drops the gradient, too, so the average is one of zeros."""
    model = dpfuse.DistributedDataParallel(network(), find_unused_parameters=True)
    optimizers = {param: AdamW([param], lr=1e-3) for param in model.parameters()}
    schedules = {param: StepLR(optimizer, 10) for param, optimizer in optimizers.items()}

    def optimizer_hook(param: Tensor) -> None:
        if param.grad is None:
            return
        optimizers[param].step()
        optimizers[param].zero_grad()
        schedules[param].step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(optimizer_hook)
    for inputs in batches(rank, STEPS):
        loss_of(model(inputs)).backward()


@wrong
def steps_inside_the_backwards_of_a_window(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(network())
    optimizers = {param: SGD([param], lr=0.01) for param in model.module[2].parameters()}
    rest = SGD([param for param in model.parameters() if param not in optimizers], lr=0.01)
    for param, optimizer in optimizers.items():
        param.register_post_accumulate_grad_hook(lambda param, optimizer=optimizer: optimizer.step())
    for step, inputs in enumerate(batches(rank, STEPS)):
        with model.no_sync(enabled=step % 2 == 0):
            loss_of(model(inputs)).backward()
        if step % 2:
            rest.step()
            model.zero_grad()


@wrong
def local_steps_whose_weights_are_never_averaged(rank: int, size: int) -> None:
    """Accumulation, with a step that was to be behind its condition."""
    model = dpfuse.DistributedDataParallel(network())
    optimizer = SGD(model.parameters(), lr=0.05)
    for step, inputs in enumerate(batches(rank, 3 * STEPS)):
        with model.no_sync(enabled=step % 3 != 2):
            loss_of(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
