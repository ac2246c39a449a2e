"""Programs whose weights leave each other for good. Each must be told of on every rank, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD

import dpfuse
from tests.weights.right_programs import STEPS, batches, loss_of, network

__all__ = ["PROGRAMS"]

Program = Callable[[int, int], Any]
PROGRAMS: dict[str, Program] = {}


def wrong(program: Program) -> Program:
    """Add a program to the list, under its name."""
    PROGRAMS[program.__name__.replace("_", " ")] = program
    return program


def meta_learning(rank: int, *, restores: bool, edits: bool) -> None:
    """First-order MAML, which may forget to take its inner steps back, or edit a weight on one rank."""
    model = dpfuse.DistributedDataParallel(network(), check_loop="off")
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
def local_steps_whose_weights_are_never_averaged(rank: int, size: int) -> None:
    """Accumulation, with a step that was to be behind its condition."""
    model = dpfuse.DistributedDataParallel(network(), check_loop="off")
    optimizer = SGD(model.parameters(), lr=0.05)
    for step, inputs in enumerate(batches(rank, 3 * STEPS)):
        with model.no_sync(enabled=step % 3 != 2):
            loss_of(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
