"""Weights that differ while a backward fails on one rank: all ranks examine them in the same backward, or none does."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, suppress

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.failures.test_spoiler import as_on_a_gpu

CHANGED = 3  # the step after which rank 1 changes its weights
HASHED = 60  # the step after which all of so few weights are hashed again
STEPS = 140  # what is missed in one pass over the weights is found in the next


def fail(grad):
    raise ZeroDivisionError


def trained(rank, size, failing, late):
    torch.manual_seed(3)
    found = []
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    with as_on_a_gpu() if late else ExitStack():
        model = dpfuse.DataParallel(net, check_training="warn")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            handle = model.module[-1].bias.register_hook(fail) if (rank, step) == (0, failing) else None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with suppress(ZeroDivisionError, dpfuse.DPFuseError):
                    model(torch.full((3, 4), rank + 1.0)).square().mean().backward()
            found += [step for each in caught if issubclass(each.category, dpfuse.WeightsWarning)]
            if handle is not None:
                handle.remove()
            if step != failing:  # on the other rank the gradients are NaN then, or there are none
                optimizer.step()
            optimizer.zero_grad()
            if (rank, step) == (1, CHANGED):
                with torch.no_grad():
                    for param in model.parameters():
                        param += 1
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failing", [30, *range(HASHED - 1, HASHED + 5)])
def test_all_ranks_examine_in_the_same_backward(ranks, failing, late):
    (first,), (second,) = ranks(trained, failing, late)
    # A rank whose backward raises tells it in the next one, which raises, too, where reports are read late.
    assert abs(first - second) <= 2 * late
