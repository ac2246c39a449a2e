"""metrics() against a reference by hand: a bare copy's local gradients, gathered."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.errors import DPFuseError

CASES = {
    "views": (dpfuse.DataParallel, {}),
    "private": (dpfuse.DistributedDataParallel, {}),
    "half wire": (dpfuse.DataParallel, {"wire_dtype": torch.bfloat16}),
    "bucket each": (dpfuse.DataParallel, {"comm_buffer_size": 0, "last_comm_buffer_size": 0}),
    "accumulating": (dpfuse.DataParallel, {"accumulate_in_buckets": True}),
}


def reference(net, batches, weight):
    for batch in batches:
        net(batch).square().mean().backward()
    local = torch.cat([param.grad.flatten() for param in net.parameters()]).double()
    both = [torch.zeros_like(local) for _ in range(2)]
    dist.all_gather(both, local)
    weights = [weight(rank) for rank in range(2)]
    total = sum(weights)
    mean = sum(w * grad for w, grad in zip(weights, both, strict=True)) / total
    small = sum(w * float(grad.square().sum()) for w, grad in zip(weights, both, strict=True)) / total
    big = float(mean.square().sum())
    return math.sqrt(big), 2 * big - small, (small - big) * total


def compared(rank, size, face, options, weighted):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 3))
    bare = copy.deepcopy(net)
    model = face(net, metrics=True, **options)
    assert model.metrics() == {}
    seen = []
    for step in range(3):
        torch.manual_seed(7 * step + rank)
        batches = [torch.randn(4, 40) for _ in range(2)]
        model.zero_grad(set_to_none=True)
        bare.zero_grad()
        if weighted:
            model.set_gradient_weight(1 + 2 * rank)
        for number, batch in enumerate(batches):
            with model.no_sync(enabled=number == 0):
                model(batch).square().mean().backward()
        seen.append((model.metrics(), reference(bare, batches, lambda r: 1 + 2 * r if weighted else 1)))
    return seen


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_norm_and_noise_are_those_of_the_reference(ranks, case, weighted):
    close = 2e-2 if case == "half wire" else 1e-4
    for seen in ranks(compared, *CASES[case], weighted):
        for step, (metrics, (norm, square, variance)) in enumerate(seen):
            assert metrics["step"] == step + 1
            assert metrics["grad_norm"] == pytest.approx(norm, rel=close)
            assert metrics["gradient_square"] == pytest.approx(square, rel=close, abs=close * norm**2)
            assert metrics["gradient_variance"] == pytest.approx(variance, rel=close)
            assert metrics["nonfinite_values"] == 0
            assert 0 <= metrics["exposed_seconds"] < 10
            assert 0 <= metrics["communication_seconds"] < 10
            assert metrics["bytes_sent"] >= 13203 * (2 if case == "half wire" else 4)


def spoilt(rank, size):
    model = dpfuse.DataParallel(nn.Linear(4, 2), metrics=True)
    model(torch.full((1, 4), math.inf if rank else 1.0)).sum().backward()
    return model.metrics()["nonfinite_values"]


def test_values_that_are_not_finite_are_counted_over_all_ranks(ranks):
    assert ranks(spoilt) == [8, 8]


def refused(rank, size):
    with pytest.raises(DPFuseError, match="metrics=True"):
        dpfuse.DataParallel(nn.Linear(4, 2)).metrics()


def test_without_the_option_nothing_was_measured(ranks):
    ranks(refused)
