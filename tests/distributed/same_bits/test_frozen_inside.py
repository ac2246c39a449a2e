"""A parameter that is frozen or unfrozen inside the loop of a step is an error on every number of ranks, or on none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine.micro_batches import MicroBatches

COUNT = 6
DIFFERENT = "the ranks have frozen different parameters"  # what all ranks hear in the last backward
NUMBERS = (0, 2, 3, 5)  # the first and the last of some rank, and one in between
MOMENTS = ("before the forward", "before the backward", "after the backward", "in the next turn")

# When requires_grad changes in the turn of a number, when it is changed back, and whether that is an error.
CASES = [
    (MOMENTS[0], MOMENTS[1], False),  # this micro-batch does not use the parameter
    (MOMENTS[0], MOMENTS[2], True),
    (MOMENTS[1], MOMENTS[2], True),
    (MOMENTS[1], MOMENTS[3], True),
    (MOMENTS[2], MOMENTS[2], False),
    (MOMENTS[2], MOMENTS[3], True),
    (MOMENTS[2], "never", True),
]


def loss(model, number):
    return model(torch.randn(2, 3, generator=torch.Generator().manual_seed(number))).square().sum()


def wrap(*, frozen=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(not frozen)
    return dpfuse.DataParallel(module, fixed_micro_batches=COUNT)


def told(model, wanted, changed, back):
    """Run a loop in which the first layer changes in the turn `wanted`; return what this rank hears, or None."""
    layer = model.module[0]
    trains = layer.weight.requires_grad

    def at(number, moment):
        if (number, moment) == (wanted, changed):
            layer.requires_grad_(not trains)
        if (number, moment) == (wanted, back) or (number == wanted + 1 and moment == MOMENTS[0] and back == MOMENTS[3]):
            layer.requires_grad_(trains)

    number = None
    try:
        for number in model.micro_batches():
            at(number, MOMENTS[0])
            value = loss(model, number)
            at(number, MOMENTS[1])
            value.backward()
            at(number, MOMENTS[2])
    except dpfuse.DPFuseError as error:
        layer.requires_grad_(trains)
        if (
            "frozen at micro-batch" not in str(error) or model.module[1].bias.grad is None
        ):  # else the peers have their means
            model.zero_grad()
            for each in model.micro_batches():  # the peers wait for this rank, or have failed as it has
                loss(model, each).backward()
        return str(error)
    finally:
        layer.requires_grad_(trains)
    return None


def check(rank, size, places, what):
    own = MicroBatches(COUNT, size).of(rank)
    for changed, back, wrong, number in places:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* got no gradient in this backward")
            heard = told(wrap(frozen=what == "unfrozen"), number, changed, back)
        place = f"{number} {changed}, changed back {back}: {heard}"
        assert wrong or heard is None, place
        named = f"rank {rank}: the parameter '0.weight' was {what} at micro-batch {number}, expected the same requires_"
        if wrong and number in own:
            assert heard is not None, place
            assert named in heard or DIFFERENT in heard, place
        elif heard is not None:
            assert DIFFERENT in heard or "the backward failed on rank" in heard, place


@pytest.mark.ranks(timeout=30)
@pytest.mark.parametrize("size", [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 6))])
def test_to_freeze_for_some_micro_batches_is_an_error_on_every_number_of_ranks(rank, size):
    check(rank, size, [(*case, number) for case in CASES for number in NUMBERS], "frozen")


@pytest.mark.ranks(timeout=30)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_to_unfreeze_is_one_too(rank, size):
    check(rank, size, [(*case, number) for case in CASES[1:] for number in NUMBERS[1:3]], "unfrozen")
