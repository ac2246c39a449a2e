"""The check before the timing: it finds every wrong mean, and accepts right ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse.commands import mean_check
from dpfuse.commands.mean_check import check_mean
from dpfuse.commands.user_model import build
from dpfuse.errors import DPFuseError
from tests.commands.models import PLACE, Uneven


@pytest.mark.parametrize("name", ["DDP", "view", "dpfuse"])
def test_right_means_pass_with_dropout(rank, size, name):
    torch.manual_seed(rank)
    target = build(f"{PLACE}:build")
    wrap = {
        "DDP": DistributedDataParallel,
        "view": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
        "dpfuse": lambda module: dpfuse.DataParallel(module, comm_buffer_size=0.1),
    }[name]
    wrapped = wrap(target.module)
    for _ in range(3):
        check_mean(name, target.module, lambda: target.backward(wrapped), dist.group.WORLD)
    assert all(param.grad is None and not param._backward_hooks for param in target.module.parameters())


def test_what_cannot_be_compared_is_said(rank, size):
    target = build(f"{PLACE}:infinite")
    with pytest.raises(DPFuseError, match=r"the mean gradient of 'weight' holds NaN or infinity.*expected a batch"):
        check_mean("nobody", target.module, lambda: target.backward(target.module), dist.group.WORLD)


def test_sparse_unused_and_repeated_parameters_pass(rank, size):
    torch.manual_seed(rank)
    module = Uneven()
    wrapped = dpfuse.DataParallel(module, find_unused_parameters=True)
    for step in range(3):
        tokens = torch.arange(4) + rank + step
        check_mean("dpfuse", module, lambda tokens=tokens: wrapped(tokens).sum().backward(), dist.group.WORLD)


def test_a_rank_that_did_not_use_a_parameter_gets_its_mean_too(rank, size):
    module = Uneven()
    wrapped = dpfuse.DataParallel(module, find_unused_parameters=True)

    def backward():
        wrapped(torch.arange(4)).sum().backward()
        if rank == 1:
            assert module.sometimes.weight.grad is not None  # rank 0's
            module.sometimes.weight.grad = None

    with pytest.raises(DPFuseError, match=r"the gradient of 'sometimes\.weight' is not the mean"):
        check_mean("dpfuse", module, backward, dist.group.WORLD)


class Transposed(nn.Module):
    """Rank 1 alone uses the weight, and computes a gradient of other strides than it has itself."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8).t()), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (self.weight * x).sum() + self.bias.sum() if dist.get_rank() else self.bias.sum()


def test_strides_do_no_harm(rank, size):
    module = Transposed()
    wrapped = dpfuse.DataParallel(module, find_unused_parameters=True)
    check_mean("dpfuse", module, lambda: wrapped(torch.randn(8, 4)).backward(), dist.group.WORLD)


class Repeated(nn.Module):
    """The engine accumulates its gradient twice in one backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) + checkpoint(self.layer, x, use_reentrant=True)


def test_several_contributions_are_added(rank, size):
    torch.manual_seed(rank)
    module, x = Repeated(), torch.randn(4, 8, requires_grad=True)
    wrapped = dpfuse.DataParallel(module)
    for _ in range(3):
        check_mean("dpfuse", module, lambda: wrapped(x).square().sum().backward(), dist.group.WORLD)


@pytest.mark.parametrize("how", ["local", "sum", "last bit", "missing"])
def test_wrong_means_raise_on_every_rank(rank, size, how):
    torch.manual_seed(rank)
    module = nn.Linear(8, 8)
    wrapped = dpfuse.DataParallel(module)

    def backward():
        if how == "local":
            module(torch.randn(4, 8)).square().sum().backward()
            return
        wrapped(torch.randn(4, 8)).sum().backward()
        if how == "sum":
            for param in module.parameters():
                param.grad *= 2
        if rank == 1 and how == "last bit":
            module.bias.grad[3] = module.bias.grad[3].nextafter(torch.tensor(torch.inf))
        if rank == 1 and how == "missing":
            module.bias.grad = None

    names = "'weight' and 1 more is" if how in ("local", "sum") else "'bias' is"
    with wrapped.no_sync(how == "local"), pytest.raises(DPFuseError, match=f"the check of ours failed .*{names}"):
        check_mean("ours", module, backward, dist.group.WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_more_ranks_only_rounding_is_forgiven(dtype):
    expected = torch.tensor([1000.0, 1e-3, 0.0], dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert mean_check._equal(expected * (1 + 2 * eps), expected, 3)
    assert not mean_check._equal(expected * (1 + 2 * eps), expected, 2)
    assert not mean_check._equal(expected * (1 + 30 * eps), expected, 3)
    assert not mean_check._equal(expected * 3, expected, 3)
    assert not mean_check._equal(torch.full_like(expected, torch.nan), expected, 3)
    assert mean_check._equal(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype), 3)
