"""Models made at random, whose gradients are given: what a loop delivers is the mean of the tree, to the bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import dpfuse
from tests.distributed.random_models import RandomModel, batch, random_sizes, same_bits, trained
from tests.distributed.same_bits.oracle import mean_of

ALL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(bare, seed, number, rng):
    """Return the gradients of a micro-batch and the places that it uses; some gradients are negative zeros."""
    gradients = batch(bare, (seed, number))
    for gradient in gradients:
        if rng.random() < 0.3:
            gradient.fill_(-0.0)
    uses = [place for place in bare.uses if rng.random() < 0.7] or bare.uses[:1]
    return gradients, uses


def local(bare, gradients, uses):
    bare = copy.deepcopy(bare)
    bare.uses = uses
    bare(gradients).backward()
    return [param.grad for param in trained(bare)]


@pytest.mark.parametrize(
    ("size", "seeds"),
    [(1, range(4)), (3, range(8))]
    + [
        pytest.param(size, seeds, marks=pytest.mark.slow)
        for size, seeds in ((2, range(4)), (4, range(5)), (3, range(100, 250)), (4, range(100, 250)))
    ],
)
@pytest.mark.ranks(timeout=240)
def test_each_gradient_is_the_mean_in_the_order_of_the_tree(rank, size, seeds):
    for seed in seeds:
        rng = np.random.default_rng((seed, size))
        bare, count = RandomModel(seed, ALL, most=300), size + int(rng.integers(0, 8))
        data = [drawn(bare, seed, number, rng) for number in range(count)]
        expected = list(map(mean_of, zip(*(local(bare, *each) for each in data), strict=True)))
        views = bool(rng.random() < 0.5)
        model = dpfuse.DataParallel(
            copy.deepcopy(bare),
            fixed_micro_batches=count,
            find_unused_parameters=True,
            gradient_as_bucket_view=views,
            **random_sizes(rng),
        )
        for step in range(3):
            for number in model.micro_batches():
                gradients, model.module.uses = data[number]
                model(gradients).backward()
            for place, (param, wanted) in enumerate(zip(trained(model), expected, strict=True)):
                where = f"seed {seed}, step {step}, V={count}, parameter {place}, views {views}"
                assert (param.grad is None) == (wanted is None), where
                assert wanted is None or same_bits(param.grad, wanted), where
            model.zero_grad()


@pytest.mark.ranks(size=3)
def test_a_bucket_without_elements_does_no_harm(rank, size):
    net = torch.nn.ParameterList([torch.ones(2), torch.ones(0)])
    model = dpfuse.DataParallel(Sum(net), fixed_micro_batches=5, comm_buffer_size=0, last_comm_buffer_size=0)
    for _ in model.micro_batches():
        model().backward()
    assert [param.grad.tolist() for param in net] == [[1.0, 1.0], []]


class Sum(torch.nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = params

    def forward(self):
        return sum(param.sum() for param in self.params)
