"""What a program learns of a step with fixed micro-batches is the same on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse

COUNT = 7


def losses(rank, size, lost_by=None):
    """The losses of a step in the order of the micro-batches, and their mean."""
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Linear(4, 3), fixed_micro_batches=COUNT)
    found = []
    for number in model.micro_batches():
        loss = model(torch.rand(5, 4)).square().mean()
        loss.backward()
        found.append(loss.detach() if number % 2 else loss.item())
    if rank == lost_by:
        del found[0]
    gathered = model.gather_micro_batches(found)
    return gathered.tolist(), gathered.mean().item()


def test_the_losses_come_in_the_order_of_the_micro_batches(ranks):
    (whole,) = ranks(losses, size=1)
    assert len(set(whole[0])) == COUNT
    for size in (2, 3, 4):
        assert ranks(losses, size=size) == [whole] * size


def missing(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 has given 1 values.*expected 2"):
        losses(rank, size, lost_by=1)


def test_a_value_that_is_missing_is_named_on_all_ranks(ranks):
    ranks(missing, size=3)


def gathered_inside(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 3), fixed_micro_batches=COUNT)
    for number in model.micro_batches():
        with pytest.raises(dpfuse.DPFuseError, match=r"gather_micro_batches\(\) was called at micro-batch"):
            model.gather_micro_batches([number])
        model(torch.rand(5, 4)).square().mean().backward()


def test_values_are_not_gathered_inside_of_the_loop(ranks):
    ranks(gathered_inside, size=3)  # which have different numbers of micro-batches


def vectors(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 3), fixed_micro_batches=size)
    with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 has given values that are no list of single numbers"):
        model.gather_micro_batches([torch.ones(2) if rank == 1 else torch.ones(1)])
    return model.gather_micro_batches([torch.full((1, 1), float(rank))]).tolist()


def test_a_value_that_is_no_number_is_named_on_all_ranks(ranks):
    assert ranks(vectors, size=2) == [[0.0, 1.0]] * 2


def stopped(rank, size):
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Linear(4, 3), fixed_micro_batches=COUNT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(9):
        for number in model.micro_batches():
            model(torch.rand(5, 4)).square().mean().backward()
            if (rank, step, number) == (size - 1, 3, COUNT - 2):
                dpfuse.request_stop("it is late")
        optimizer.step()
        optimizer.zero_grad()
        if model.stop_requested:
            dpfuse.forget_stop()
            return step
    return None


def test_all_ranks_stop_after_the_same_step(ranks):
    assert ranks(stopped, size=3) == [3] * 3
