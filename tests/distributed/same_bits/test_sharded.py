"""Sharded optimizers: the parts of the ranks lie at other places on each number of ranks, and the bits are equal.

A processor computes what is left over at the end of a vector with other code than the rest, which rounds 16-bit numbers
elsewhere in SGD and RMSprop. And a sum over the parts of the ranks would have another order.
"""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import nn

import dpfuse

COUNT, STEPS = 5, 6
OPTIMIZERS = {
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD, fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
}


def trained(name, dtype, masters, order):
    """Clip in each step; one layer is frozen in some, and used by no micro-batch in others."""
    torch.manual_seed(4)
    layers = nn.ModuleList([nn.Linear(37, 53), nn.Linear(53, 41), nn.Linear(53, 41), nn.Linear(41, 19)])
    layers = layers.to(getattr(torch, dtype))
    model = dpfuse.DataParallel(Chain(layers), fixed_micro_batches=COUNT, find_unused_parameters=True)
    kind, settings = OPTIMIZERS[name]
    optimizer = dpfuse.ShardedOptimizer(model, kind, master_dtype=torch.float32 if masters else None, **settings)
    norms = []
    for step in range(STEPS):
        for number in model.micro_batches():
            inputs = torch.randn(3, 37).to(layers[0].weight.dtype)
            model(inputs, with_third=step % 2 and number != 2).float().square().mean().backward()
        norms.append(model.clip_grad_norm_(0.05, order).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [param.tolist() for param in layers.parameters()]


class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, *, with_third):
        first, second, third, last = self.layers
        hidden = torch.tanh(first(inputs))
        values = second(hidden) + third(hidden) if with_third else second(hidden)
        return last(torch.tanh(values))


CASES = [
    *((name, dtype, False, 2.0) for name in OPTIMIZERS for dtype in ("bfloat16", "float64")),
    ("RMSprop", "bfloat16", True, 2.0),  # with float32 copies
    ("RMSprop", "bfloat16", False, inf),
]


def all_trained(rank, size):
    return [trained(*case) for case in CASES]


@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 4), marks=pytest.mark.slow)], ids=str)
def test_weights_and_norms_have_the_same_bits(ranks, sizes):
    (whole,) = ranks(all_trained, size=1)
    for size in sizes:
        for told in ranks(all_trained, size=size):
            for case, one, many in zip(CASES, whole, told, strict=True):
                assert many == one, (case, size)


def norm_inside(rank, size):
    """Ranks have different numbers of turns: a norm in each would be a collective that the others do not call."""
    model = dpfuse.DataParallel(nn.Linear(4, 3), fixed_micro_batches=COUNT)
    dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in model.micro_batches():
        with pytest.raises(dpfuse.DPFuseError, match="norm of the gradients was asked for at micro-batch"):
            model.clip_grad_norm_(1.0)
        model(torch.rand(2, 4)).sum().backward()
    return model.grad_norm().item()


def test_a_norm_inside_of_the_loop_is_refused(ranks):
    assert len(set(ranks(norm_inside, size=3))) == 1


def refused(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 3), fixed_micro_batches=COUNT)
    dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in model.micro_batches():
        model(torch.rand(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"norm_type must be 2.0 or math.inf"):
        model.grad_norm(1.0)
    return model.grad_norm().item()


def test_a_norm_that_would_depend_on_the_ranks_is_refused(ranks):
    assert len(set(ranks(refused, size=2))) == 1
