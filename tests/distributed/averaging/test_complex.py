"""Complex parameters: their gradients travel as pairs of real numbers, and are torch's bit for bit on two ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse import DataParallel, DistributedDataParallel


class Waves(nn.Module):
    """Complex weights of several shapes and memory orders, one whose gradient is a conjugate view, and real ones."""

    def __init__(self, dtype=torch.complex64, real=True):
        super().__init__()
        self.lift = nn.Linear(3, 5, dtype=dtype)
        self.turned = nn.Parameter(torch.randn(4, 5, dtype=dtype).t())
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.twist = nn.Parameter(torch.randn(4, dtype=dtype))
        self.spare = nn.Parameter(torch.randn(2, 3, dtype=dtype))
        self.head = nn.Linear(4, 2, dtype=dtype.to_real()) if real else nn.Identity()

    def forward(self, x, use_spare):
        wave = self.lift(x) @ self.turned * self.phase
        wave = wave + (self.twist.conj() * wave.detach()[0])
        if use_spare:
            wave = wave + self.spare.sum()
        return self.head(wave.abs())


def inputs(rank, step, dtype):
    torch.manual_seed(10 * step + rank)
    return torch.randn(6, 3, dtype=dtype)


def assert_bits(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert a.grad.dtype == a.dtype
            assert torch.equal(a.grad.resolve_conj(), b.grad.resolve_conj()), name
            assert a.grad.stride() == a.stride() or a.dim() < 2, name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("real", [True, False], ids=["mixed", "complex"])
@pytest.mark.parametrize("hook", [None, allreduce_hook, fp16_compress_hook])
def test_gradients_are_torchs(rank, size, dtype, views, real, hook):
    torch.manual_seed(0)
    net = Waves(dtype, real)
    ours = DistributedDataParallel(copy.deepcopy(net), gradient_as_bucket_view=views, find_unused_parameters=True)
    theirs = TorchDDP(copy.deepcopy(net), gradient_as_bucket_view=views, find_unused_parameters=True)
    if hook is not None:
        for model in (ours, theirs):
            model.register_comm_hook(None, hook)
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            if step == 3:  # accumulated
                with model.no_sync():
                    model(inputs(rank, 7, dtype), False).square().sum().backward()
            model(inputs(rank, step, dtype), step and rank).square().sum().backward()
        if hook is None or step != 3:
            assert_bits(ours.module, theirs.module)


def mean_of(net, size):
    grads = []
    for param in net.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.resolve_conj().clone()
        grad = torch.view_as_real(grad.contiguous()) if grad.is_complex() else grad
        dist.all_reduce(grad)
        grads.append(grad / size)
    return [torch.view_as_complex(g) if p.is_complex() else g for g, p in zip(grads, net.parameters(), strict=True)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6), ({"gradient_scale": 1.0}, 1e-6), ({"wire_dtype": torch.bfloat16}, 2e-2),
        ({"wire_dtype": torch.float16}, 2e-3), ({"comm_buffer_size": 0, "last_comm_buffer_size": 0}, 1e-6),
    ],
)  # fmt: skip
@pytest.mark.ranks(size=3)
def test_three_ranks_scales_and_narrow_wires(rank, size, views, options, tolerance):
    torch.manual_seed(0)
    model = DataParallel(Waves(), gradient_as_bucket_view=views, **options)
    bare = copy.deepcopy(model.module)
    for step in range(3):
        for net in (model, bare):
            net.zero_grad()
            net(inputs(rank, step, torch.complex64), True).square().sum().backward()
        for param, mean in zip(model.module.parameters(), mean_of(bare, size), strict=True):
            factor = options.get("gradient_scale", 1 / size) * size
            torch.testing.assert_close(param.grad, mean * factor, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_manual_path_averages_them(rank, size, dtype):
    torch.manual_seed(0)
    net = Waves(dtype)
    net(inputs(rank, 0, dtype), True).square().sum().backward()
    net.spare.grad = torch.full((2, 3), 1 + rank * 1j, dtype=dtype).conj()
    net.twist.grad = torch.tensor(2 - rank * 1j, dtype=dtype).expand(4)
    expected = mean_of(net, size)
    dpfuse.fused_allreduce_gradients(net.parameters())
    for param, mean in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad.resolve_conj(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_conjugate_gradients_are_resolved(rank, size, views):
    """`.grad` itself is a lazy conjugate where a conjugate was multiplied."""
    bare = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
    vector = torch.tensor([1 + 1j, 2 - 1j, 3j]) * (rank + 1)
    (bare.conj() * vector).sum().real.backward()
    assert bare.grad.is_conj()

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))

        def forward(self, x):
            return (self.weight.conj() * x).sum().real

    model = DataParallel(Product(), gradient_as_bucket_view=views)
    for _ in range(3):
        model.zero_grad()
        model(vector).backward()
        assert torch.equal(model.weight.grad.resolve_conj(), (vector / (rank + 1)).expand(3, 3) * 1.5)
    model.weight.grad = bare.grad  # accumulated by somebody else
    model(vector).backward()
    assert torch.equal(model.weight.grad.resolve_conj(), (vector / (rank + 1)).expand(3, 3) * 3)


def what_hooks_see(rank, size):
    seen = []

    def hook(state, bucket):
        seen.append((bucket.buffer().dtype, [gradient.dtype for gradient in bucket.gradients()]))
        for gradient in bucket.gradients():
            gradient.mul_(1j)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(nn.Linear(3, 2, dtype=torch.complex64))
    model.register_comm_hook(None, hook)
    x = inputs(rank, 0, torch.complex64)
    model(x).abs().sum().backward()
    local = torch.autograd.grad(model.module(x).abs().sum(), list(model.parameters()))
    for param, grad in zip(model.parameters(), local, strict=True):
        torch.testing.assert_close(param.grad, grad * 1j)
    return seen


def test_hooks_get_pairs_of_real_numbers_and_complex_gradients(ranks):
    # torch's bucket has the same buffer; its gradients() cuts complex ones wrongly.
    assert ranks(what_hooks_see) == [[(torch.float32, [torch.complex64] * 2)]] * 2


def test_a_complex_model_may_change_too(rank, size):
    torch.manual_seed(0)
    model = DataParallel(Waves(real=False), find_unused_parameters=True)
    for dtype in (torch.complex64, torch.complex128):
        model.to(dtype)
        bare = copy.deepcopy(model.module)
        for net in (model, bare):
            net.zero_grad()
            net(inputs(rank, 0, dtype), False).square().sum().backward()
        for param, mean in zip(model.module.parameters(), mean_of(bare, size), strict=True):
            assert param.grad is None or torch.equal(param.grad, mean)
    if rank == 1:
        model.module.phase = nn.Parameter(torch.ones((), dtype=torch.complex64))
    with pytest.raises(dpfuse.DPFuseError, match="changed on rank 1 of 2"):
        model(inputs(rank, 0, torch.complex128), False).sum().backward()


def test_complex_embeddings_with_sparse_gradients_are_refused(rank, size):
    with pytest.raises(TypeError, match="'weight' has sparse gradients of dtype complex64; expected real ones"):
        DataParallel(nn.Embedding(3, 2, sparse=True, dtype=torch.complex64))
