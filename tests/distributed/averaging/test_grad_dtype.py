"""Gradients of another dtype than their parameters (`Tensor.grad_dtype`): averaged in their own dtype."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

FACES = {
    "paddle": dpfuse.DataParallel,
    "torch": dpfuse.DistributedDataParallel,
    "torch, views": partial(dpfuse.DistributedDataParallel, gradient_as_bucket_view=True),
}
OPTIONS = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "wire": {"wire_dtype": torch.bfloat16},
    "error feedback": {"wire_dtype": torch.bfloat16, "error_feedback": True},
    "finite": {"check_finite": "raise"},
    "in buckets": {"accumulate_in_buckets": True},
    "metrics": {"metrics": True},
}


class Net(nn.Module):
    """16-bit parameters, most of them with float32 gradients, one with gradients of its own dtype, one not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        for name, param in self.named_parameters():
            if name != "scale":
                param.grad_dtype = torch.float32

    def forward(self, x):
        return self.layers(x) * self.scale


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()


def own_gradients(module, x):
    """What one rank computes, in the dtypes of its gradients."""
    for param in module.parameters():
        param.grad = None
    module(x).float().square().mean().backward()
    return [param.grad for param in module.parameters()]


def train(model, rank, step):
    model(batch(rank, step)).float().square().mean().backward()


def check(model, size, steps, **tolerance):
    """Compare with the sum over the steps of the mean over the ranks."""
    plain = Net()
    plain.load_state_dict(model.module.state_dict())
    found = [own_gradients(plain, batch(rank, step)) for step in steps for rank in range(size)]
    for (name, param), grads in zip(model.module.named_parameters(), zip(*found, strict=True), strict=True):
        if name == "unused":
            assert param.grad is None
            continue
        assert param.grad.dtype == (torch.bfloat16 if name == "scale" else torch.float32), name
        mean = sum(grad.double() for grad in grads) / size
        limits = {"rtol": 1e-2, "atol": 1e-3} if name == "scale" else {"rtol": 1e-6, "atol": 1e-7} | tolerance
        torch.testing.assert_close(param.grad.double(), mean, **limits)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*unused")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("face", FACES)
def test_gradients_are_averaged_in_their_own_dtype(rank, size, face, options):
    model = FACES[face](Net(), find_unused_parameters=options != "in buckets", **OPTIONS[options])
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if "wire_dtype" in OPTIONS[options] else {}
    for step in range(4):
        model.zero_grad()
        train(model, rank, step)
        check(model, size, [step], **tolerance)
    model.zero_grad()
    with model.no_sync():
        train(model, rank, 4)
    train(model, rank, 5)
    check(model, size, [4, 5], **tolerance)
    norm = torch.stack([param.grad.double().norm() for param in model.parameters() if param.grad is not None]).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e6).double(), norm, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("face", FACES)
def test_two_ranks_give_the_bits_of_a_mean_in_float32(rank, size, face):
    model = FACES[face](Net(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        train(model, rank, step)
        plain = Net()
        found = [own_gradients(plain, batch(each, step)) for each in range(size)]
        for (name, param), (one, other) in zip(model.module.named_parameters(), zip(*found, strict=True), strict=True):
            if name != "unused":
                assert torch.equal(param.grad, one / 2 + other / 2), name


@pytest.mark.parametrize("face", FACES)
def test_buckets_count_the_bytes_of_gradients(rank, size, face):
    model = FACES[face](Net())
    sizes = {bucket.dtype: bucket.nbytes for bucket in model.bucket_plan.buckets}
    assert sizes == {"float32": 4 * (6 * 8 + 8 + 8 * 4 + 4 + 3), "bfloat16": 2 * 4}


@pytest.mark.parametrize("face", FACES)
def test_a_copy_averages_the_gradients_that_it_has(rank, size, face):
    """torch copies no `grad_dtype`, so those of a copy have the dtype of their parameters."""
    model = FACES[face](Net(), find_unused_parameters=True)
    train(model, rank, 0)
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        param.grad = None
    train(twin, rank, 1)
    assert {param.grad.dtype for param in twin.parameters() if param.grad is not None} == {torch.bfloat16}
    model.zero_grad()
    train(model, rank, 1)
    check(model, size, [1])


def test_by_hand(rank, size):
    net = Net()
    for param, grad in zip(net.parameters(), own_gradients(net, batch(rank, 0)), strict=True):
        param.grad = grad
    dpfuse.fused_allreduce_gradients(net.parameters())
    plain = Net()
    found = [own_gradients(plain, batch(each, 0)) for each in range(size)]
    for (name, param), (one, other) in zip(net.named_parameters(), zip(*found, strict=True), strict=True):
        if name != "unused":
            assert torch.equal(param.grad, one / 2 + other / 2), name


@pytest.mark.parametrize("ranks_that_set", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("face", FACES)
def test_a_dtype_that_is_set_after_wrapping_is_an_error_on_all_ranks(rank, size, face, ranks_that_set):
    model = FACES[face](nn.Linear(4, 2).bfloat16())
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    model.zero_grad()
    if rank in ranks_that_set:
        model.module.weight.grad_dtype = torch.float32
    out = model(x).float().sum()
    with pytest.raises(dpfuse.DPFuseError, match=r"weight|rank 1"):
        out.backward()
    dist.barrier()


@pytest.mark.parametrize("face", FACES)
def test_a_dtype_that_is_set_with_another_change_is_followed(rank, size, face):
    model = FACES[face](nn.Linear(4, 2).bfloat16())
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    model.zero_grad()
    model.to(torch.float16)
    for param in model.parameters():
        param.grad_dtype = torch.float32
    model(x.half()).float().sum().backward()
    assert model.module.weight.grad.dtype == torch.float32
    assert model.module.weight.grad.tolist() == [[3.0] * 4] * 2


@pytest.mark.parametrize("face", FACES)
def test_ranks_that_differ_cannot_be_wrapped(rank, size, face):
    net = nn.Linear(4, 2).bfloat16()
    if rank == 1:
        net.weight.grad_dtype = torch.float32
    with pytest.raises(dpfuse.DPFuseError, match="grad_dtype"):
        FACES[face](net)


@pytest.mark.parametrize("face", FACES)
def test_any_dtype_is_refused(rank, size, face):
    net = nn.Linear(4, 2).bfloat16()
    net.bias.grad_dtype = None
    with pytest.raises(ValueError, match=r"parameter 'bias' has grad_dtype=None.*Set bias.grad_dtype"):
        FACES[face](net)


def test_a_sharded_optimizer_refuses_it(rank, size):
    net = nn.Linear(4, 2).bfloat16()
    net.bias.grad_dtype = torch.float32
    model = dpfuse.DataParallel(net)
    with pytest.raises(ValueError, match=r"'bias' of dtype torch.bfloat16, whose grad_dtype is torch.float32"):
        dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
