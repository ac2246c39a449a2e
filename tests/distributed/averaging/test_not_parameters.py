"""What is in a parameter's place and is none, or none yet: results of computations, and lazy parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import dpfuse
from dpfuse import DataParallel, DistributedDataParallel

FACES = {"paddle": DataParallel, "torch": DistributedDataParallel}


@pytest.mark.parametrize("face", FACES)
def test_results_that_stand_in_for_parameters_are_no_change(rank, size, face):
    """MAML's step: gradients of the parameters, through results of them that stand in their places."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    models = (copy.deepcopy(net), FACES[face](net))
    plan = models[1].bucket_plan
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(5, 3)
        for model in models:
            model.zero_grad()
            params = dict(model.named_parameters())
            grads = torch.autograd.grad(model(x).square().sum(), params.values(), create_graph=True)
            better = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
            functional_call(model, better, (x,)).square().sum().backward()
        for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
            mean = theirs.grad / size
            dist.all_reduce(mean)
            torch.testing.assert_close(ours.grad, mean)
    assert [spec.name for spec in models[1].bucket_plan.specs] == [spec.name for spec in plan.specs]
    # A result beside leaves: the parameter under the result is averaged, and the leaves are not the wrapper's.
    model = models[1]
    model.zero_grad()
    mixed = {name: p * 2 if name.endswith("0.weight") else nn.Parameter(p.detach()) for name, p in params.items()}
    functional_call(model, mixed, (x,)).sum().backward(retain_graph=True)
    leaves = [p for p in mixed.values() if p.is_leaf]
    local = torch.autograd.grad(functional_call(model, mixed, (x,)).sum(), [params["module.0.weight"], *leaves])
    assert all(map(torch.equal, [p.grad for p in leaves], local[1:]))
    dist.all_reduce(mean := local[0] / size)
    torch.testing.assert_close(model.module[0].weight.grad, mean)
    assert model.module[0].bias.grad is None


@pytest.mark.parametrize("face", FACES)
def test_a_lazy_layer_takes_part_once_its_shapes_are_known(rank, size, face):
    model = FACES[face](nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    x = torch.full((4, 3), 1.0 + rank)
    model(x).sum().backward()
    torch.manual_seed(1)
    model.module[1] = nn.LazyLinear(2)
    with pytest.raises((ValueError, dpfuse.DPFuseError), match=r"'1.weight' is uninitialized"):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.module[1].bias.grad, torch.full((2,), 4.0))
    assert any(spec.name.startswith("1.") and spec.shape == (2, 4) for spec in model.bucket_plan.specs)
