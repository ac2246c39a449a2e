"""Backwards that user code ends by an exception: nothing hangs, each rank raises once, the next step is right."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.engine.events import Watcher

PEER = r"the backward failed on rank 1 of 2, so rank 0 has no averaged gradients"


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blow):
        ctx.blow = blow
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.blow:
            raise KeyError("planted")
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, blow=False):
        for index, layer in enumerate(self.layers):
            x = Fuse.apply(layer(x), blow and index == 1)
        return x


def right_steps(model, rank, size, count=3):
    for step in range(count):
        model.zero_grad()
        x = torch.full((2, 3), 1.0 + rank + step)
        model(x).sum().backward()
        assert_mean(model, x, size)


def assert_mean(model, x, size):
    bare = Net()
    bare.load_state_dict(model.state_dict())
    bare(x).sum().backward()
    for got, local in zip(model.module.parameters(), bare.parameters(), strict=True):
        mean = local.grad / size
        dist.all_reduce(mean)
        torch.testing.assert_close(got.grad, mean)


def raised_on(rank):
    error, text = (KeyError, "planted") if rank == 1 else (dpfuse.DPFuseError, PEER)
    return pytest.raises(error, match=text)


class Interrupting(Watcher):
    """Ctrl-C strikes as the last bucket was sent."""

    def bucket_sent(self, tensors, work, *, is_last):
        if is_last:
            raise KeyboardInterrupt


def test_an_interruption_behind_the_last_bucket_does_not_keep_its_companion_back(rank, size):
    """The peers wait for the buffers of a normalization, which travel beside it."""
    torch.manual_seed(0)
    model = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for step in range(5):
        interrupted = rank == 0 and step == 2
        model._observe(Interrupting() if interrupted else None)
        model.zero_grad()
        loss = model(torch.full((2, 3), 1.0 + rank + step)).square().sum()
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            loss.backward()
    mean = model.module[1].running_mean.clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, model.module[1].running_mean)


def next_backward(model):
    """A backward without a forward of the wrapper, straight after the one that died."""
    model.module(torch.ones(2, 3)).sum().backward()


def planted(_grad):
    raise KeyError("planted")


def inside_no_sync(rank, size):
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    with model.no_sync():
        if rank == 1:
            with pytest.raises(KeyError, match="planted"):
                model(torch.ones(2, 3), True).sum().backward()
    right_steps(model, rank, size)


def in_the_forward(rank, size):
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))
    right_steps(model, rank, size)


def non_scalar(rank, size):
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    right_steps(model, rank, size, 2)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        model(torch.ones(2, 3)).backward()
    right_steps(model, rank, size)


@pytest.mark.parametrize("before", [0, 2], ids=["recorded", "rebuilt"])
def test_an_exception_on_every_rank_costs_only_that_step(rank, size, before):
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    right_steps(model, rank, size, before)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(KeyError, match="planted"):
            model(torch.ones(2, 3), True).sum().backward()
        right_steps(model, rank, size)


@pytest.mark.parametrize("before", [0, 2], ids=["recorded", "rebuilt"])
def test_an_exception_on_one_rank_is_one_error_on_each_and_the_next_step_is_right(rank, size, before):
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    right_steps(model, rank, size, before)
    for _ in range(2):
        with raised_on(rank) as error:
            model(torch.ones(2, 3), rank == 1).sum().backward()
        assert rank == 1 or "zero them before the next one" in str(error.value)
        right_steps(model, rank, size)


def test_the_next_backward_of_a_program_needs_no_new_forward(rank, size):
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    right_steps(model, rank, size, 2)
    x = torch.full((2, 3), 1.0 + rank)
    first, second = model(x, rank == 1), model(x)
    with raised_on(rank):
        first.sum().backward()
    model.zero_grad()
    second.sum().backward()
    assert_mean(model, x, size)
    right_steps(model, rank, size)


def test_a_second_failure_is_a_second_error(rank, size):
    """What a backward without a forward adds to gradients that the dead one has sent is lost, on rank 1."""
    model = dpfuse.DataParallel(Net(), None, 0, 0)
    right_steps(model, rank, size, 2)
    if rank == 1:
        with pytest.raises(KeyError, match="planted"):
            model(torch.ones(2, 3), True).sum().backward()
        with pytest.raises(dpfuse.DPFuseError, match="rank 1: an exception ended the last backward after it"):
            next_backward(model)
    else:
        for _ in range(2):
            with pytest.raises(dpfuse.DPFuseError, match=PEER):
                model(torch.ones(2, 3)).sum().backward()
    right_steps(model, rank, size)


@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
def test_a_backward_without_forward_after_one_that_died_is_an_error(rank, size, views):
    """What a backward adds to gradients that the dead one has sent is lost, and not in silence."""
    model = dpfuse.DataParallel(Net(), None, 0, 0, gradient_as_bucket_view=views)
    right_steps(model, rank, size)
    for sent in (True, False):
        with pytest.raises(KeyError, match="planted"):
            if sent:
                model(torch.ones(2, 3), True).sum().backward()
            else:
                output = model(torch.ones(2, 3))
                output.register_hook(planted)
                output.sum().backward()
        model.zero_grad(set_to_none=False)
        if sent:
            with pytest.raises(dpfuse.DPFuseError, match=f"rank {rank}: an exception ended the last backward after it"):
                next_backward(model)
    next_backward(model)
    means = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    for param, mean in zip(model.parameters(), means, strict=True):
        assert torch.equal(param.grad, mean)
    right_steps(model, rank, size)


@pytest.mark.parametrize("case", [inside_no_sync, in_the_forward, non_scalar])
def test_other_exceptions_leave_no_trace(ranks, case):
    ranks(case)
