"""Two failures that meet: on one rank or on two, in one backward or in later ones. No rank goes on with other weights.

docs/design/failures.md has the rule, and tests/unit/test_failure_rules.py plays it in every order of events.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

BATCHES = 7
FIRST = 1  # the batch of the first failure
PLACES = ("forward", "loss", "hook", "step")
TOLD = "has not used the mean"


class Fault(NamedTuple):
    rank: int
    place: str
    batch: int


class Plan:
    """Raises in planned batches of one rank, once in each."""

    def __init__(self, faults, rank):
        self.left = [fault for fault in faults if fault.rank == rank]
        self.batch = 0

    def at(self, place, result=None):
        for fault in self.left:
            if (fault.place, fault.batch) == (place, self.batch):
                self.left.remove(fault)
                raise RuntimeError(f"planted in {place}")
        return result


class Net(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        self.plan = plan
        self.layers[1].weight.register_hook(partial(plan.at, "hook"))

    def forward(self, x):
        self.plan.at("forward")
        outputs = self.layers(x)
        outputs.register_hook(partial(self.plan.at, "loss"))
        return outputs


class Descent(torch.optim.SGD):
    """An optimizer that raises in planned batches."""

    def __init__(self, net):
        super().__init__(net.parameters(), lr=0.01)
        self.plan = net.plan

    def step(self):
        self.plan.at("step")
        super().step()


def batch(rank, number):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def assert_mean(model, number, size):
    """Assert that the gradients are the mean over this batch of all ranks, with the weights of this rank."""
    bare = nn.Sequential(*copy.deepcopy(list(model.module.layers)))
    bare.zero_grad()
    for rank in range(size):
        (bare(batch(rank, number)).square().sum() / size).backward()
    for got, expected in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, msg=f"not the mean of batch {number}")


def train(rank, size, faults, *, skips):
    """Train like a program that catches all exceptions; return their texts."""
    group = dist.new_group()  # of no other model: Python's collector may find an earlier one later
    torch.manual_seed(0)
    net = Net(Plan(faults, rank))
    checkpoint = copy.deepcopy(net.layers.state_dict())
    model = dpfuse.DataParallel(net, None, 0, 0, group=group)
    optimizer, number, errors = Descent(net), 0, []
    while number < BATCHES:
        net.plan.batch = number
        model.zero_grad()
        try:
            model(batch(rank, number)).square().sum().backward()
            assert_mean(model, number, size)
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))
            number += skips
            if TOLD in str(error):
                net.layers.load_state_dict(checkpoint)
                number = 0
        else:
            number += 1
    for param in model.parameters():
        found = [torch.empty_like(param) for _ in range(size)]
        dist.all_gather(found, param.detach())
        assert all(torch.equal(found[0], each) for each in found), f"other weights after {errors}"
    dist.destroy_process_group(group)
    return errors


def most_errors(rank, faults):
    """Return how many exceptions a rank may see: one for each failure, and one more for a step of its own."""
    others = sum(fault.place != "forward" for fault in faults if fault.rank != rank)
    return others + sum(1 + (fault.place == "step") for fault in faults if fault.rank == rank)


def pairs(skips):
    """Return all pairs of failures, of which rank 0 has the first one. A skipped batch of one rank is no pair."""
    places = [place for place in PLACES if not (skips and place == "forward")]
    for first, second, rank, later in product(places, places, (0, 1), (0, 1, 2)):
        if (rank, later) != (0, 0):
            yield Fault(0, first, FIRST), Fault(rank, second, FIRST + later)


def assert_right(rank, size, faults, *, skips):
    try:
        errors = train(rank, size, faults, skips=skips)
    except AssertionError as error:
        raise AssertionError(f"{faults}: {error}") from error
    assert len(errors) <= most_errors(rank, faults), f"{faults}: {errors}"


SKIPS = pytest.mark.parametrize("skips", [True, False], ids=["skip", "repeat"])


@pytest.mark.one_in(2)
@pytest.mark.ranks(size=3)
@SKIPS
@pytest.mark.parametrize(
    "faults",
    [
        (Fault(0, "loss", 1), Fault(1, "hook", 1)),
        (Fault(0, "hook", 1), Fault(0, "loss", 2)),
        (Fault(0, "step", 1), Fault(1, "step", 1)),
        (Fault(0, "step", 1), Fault(0, "hook", 2)),
    ],
)
def test_ranks_pair_and_have_equal_weights_after_two_failures(rank, size, faults, skips):
    assert_right(rank, size, faults, skips=skips)


@pytest.mark.one_in(2)
@pytest.mark.ranks(size=3)
@SKIPS
@pytest.mark.parametrize("place", ["loss", "hook"])
def test_a_mean_that_was_not_used_is_told_after_a_backward_that_failed_on_another_rank(rank, size, place, skips):
    assert_right(rank, size, (Fault(0, "step", 1), Fault(1, place, 2)), skips=skips)


@pytest.mark.ranks(size=3)
def test_it_is_told_after_a_forward_that_failed_on_the_same_rank(rank, size):
    assert_right(rank, size, (Fault(0, "step", 1), Fault(0, "forward", 2)), skips=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.ranks(size=3, timeout=300)
@SKIPS
def test_so_they_do_after_any_two(rank, size, skips):
    for faults in pairs(skips):
        assert_right(rank, size, faults, skips=skips)
