"""Twenty training steps beside torch's DistributedDataParallel in the same processes: equal bit for bit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dpfuse
from tests.distributed.in_place import Tied

STEPS = 20


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, x, step):
        return self.layers(x)


class Convolutional(nn.Module):
    """Channels-last weights: gradients and views have permuted strides."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(1, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x, step):
        image = x.repeat(1, 18)[:, :108].reshape(-1, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        return self.head(self.norm(torch.relu(self.conv(image))).mean((2, 3)))


class SeveralDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 5), nn.Linear(5, 5).double()
        self.brief, self.head = nn.Linear(5, 5).bfloat16(), nn.Linear(5, 3)

    def forward(self, x, step):
        h = torch.tanh(self.narrow(x.float())).double()
        h = torch.tanh(self.wide(h)).bfloat16()
        return self.head(torch.tanh(self.brief(h)).float()).to(x.dtype)


class Checkpointed(Mlp):
    reentrant = False

    def forward(self, x, step):
        x.requires_grad_()
        h = checkpoint(self.layers[:2], x, use_reentrant=self.reentrant)
        h = checkpoint(self.layers[2:4], h, use_reentrant=self.reentrant)
        return self.layers[4](h)


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class NestedBackward(torch.autograd.Function):
    """A custom function whose backward runs a backward of its own into parameters."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


class WithNestedBackward(Mlp):
    def forward(self, x, step):
        h = self.layers[:2](x)
        return self.layers[3:](NestedBackward.apply(h, self.layers[2]))


class Branching(Mlp):
    """Which branch is used depends on the step, alike on all ranks, and on the rank's data."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x, step):
        y = self.layers(x)
        return y + self.extra(x) if (step + int(x.sum() > 0)) % 2 else y


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def train_beside_ddp(rank, size, net, dtype, optimizer, micros, views, set_to_none=True, find_unused=False):
    find_unused = find_unused or net is Branching
    bare = net() if net is SeveralDtypes else net().to(dtype)
    ours = dpfuse.DataParallel(
        copy.deepcopy(bare),
        comm_buffer_size=200 / 2**20,
        last_comm_buffer_size=64 / 2**20,
        gradient_as_bucket_view=views,
        find_unused_parameters=find_unused,
    )
    theirs = DistributedDataParallel(
        copy.deepcopy(bare), find_unused_parameters=find_unused, gradient_as_bucket_view=views
    )
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        for micro in range(micros):
            x = torch.randn(4, 6, generator=generator, dtype=dtype)
            t = torch.randn(4, 3, generator=generator, dtype=dtype)
            losses = []
            for model in (ours, theirs):
                with model.no_sync() if micro < micros - 1 else contextlib.nullcontext():
                    losses.append(F.mse_loss(model(x.clone(), step), t))
                    losses[-1].backward()
            assert torch.equal(*losses), f"loss of step {step}"
        compare(ours, theirs, step)
        for stepper in optimizers:
            stepper.step()
            stepper.zero_grad(set_to_none=set_to_none)
    for a, b in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        assert torch.equal(a, b)


def compare(ours, theirs, step):
    for (name, a), b in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{name} in step {step}"
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad), f"{name} in step {step}"
            assert a.grad.stride() == a.stride() or a.numel() < 2


NETS = [
    Mlp, Convolutional, Tied, SeveralDtypes, Checkpointed, ReentrantCheckpointed, WithNestedBackward, Branching,
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("net", NETS)
def test_twenty_steps_equal_ddp_bitwise(ranks, net, dtype, views):
    ranks(train_beside_ddp, net, dtype, "momentum", 1, views)


@pytest.mark.parametrize("views", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["views", "private"])
@pytest.mark.parametrize(
    "micros", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "net", [*(pytest.param(net, marks=pytest.mark.slow) for net in (Mlp, Tied)), Checkpointed, SeveralDtypes, Branching]
)
def test_accumulation_equals_ddp_bitwise(ranks, net, micros, views):
    ranks(train_beside_ddp, net, torch.float32, "sgd", micros, views)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("views", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["views", "private"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_and_way_of_zeroing_equals_ddp_bitwise(ranks, optimizer, views, set_to_none):
    ranks(train_beside_ddp, Mlp, torch.float32, optimizer, 2, views, set_to_none)


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_searching_for_unused_parameters_where_there_are_none_equals_ddp_bitwise(ranks, views):
    ranks(train_beside_ddp, Mlp, torch.float32, "adam", 2, views, True, True)
