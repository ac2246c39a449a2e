"""Parameters that are ready before any output of the wrapper is reached: outputs themselves, or used in the loss alone.

Everything is compared with one process that computes the batches of all ranks.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfuse
from tests.operations import Operations

STEPS = 4  # the first is recorded; buckets are planned for the order of ready marks from the second one on
FACES = {
    "paddle": lambda net: dpfuse.DataParallel(net, find_unused_parameters=True),
    "torch": lambda net: dpfuse.DistributedDataParallel(net, find_unused_parameters=True),
    "small buckets": lambda net: dpfuse.DataParallel(net, comm_buffer_size=1e-4, last_comm_buffer_size=1e-5,
                                                     find_unused_parameters=True),
    "private": lambda net: dpfuse.DataParallel(net, comm_buffer_size=1e-4, gradient_as_bucket_view=False,
                                               find_unused_parameters=True),
    "accumulating": lambda net: dpfuse.DataParallel(net, accumulate_in_buckets=True, find_unused_parameters=True),
}  # fmt: skip


class Net(nn.Module):
    """Layers, and parameters that forward does not use: a temperature first, a bias and weights of losses last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.bias = nn.Parameter(torch.tensor(0.1))
        self.weights = nn.Parameter(torch.tensor([0.2, 0.3]))

    def forward(self, x):
        return self.layers(x), {"bias": self.bias, "again": [self.bias, self.scale]}


class FromAllRanks(torch.autograd.Function):
    """Features of all ranks; each rank gets the gradient of its own part."""

    @staticmethod
    def forward(ctx, x, here):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.here = here
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.here], None


def raw_output(call, net, x, rank):
    features, rest = call(x)
    return features.square().mean() + rest["bias"]


def temperature(call, net, x, rank):
    return (call(x)[0] * net.scale.exp()).square().mean()


def weights_of_losses(call, net, x, rank):
    features, _ = call(x)
    losses = torch.stack([features.square().mean(), features.abs().mean()])
    return (losses * torch.exp(-net.weights) + net.weights).sum()


def penalty(call, net, x, rank):
    return call(x)[0].square().mean() + 0.1 * sum(param.square().sum() for param in net.parameters())


def on_one_rank_only(call, net, x, rank):
    features, rest = call(x)
    return features.square().mean() * (net.scale + 3 * rest["again"][0] if rank else 1.0)


def in_a_reentrant_checkpoint(call, net, x, rank):
    features, _ = call(x)
    return checkpoint(lambda f: (f * net.scale).square(), features, use_reentrant=True).mean() + net.bias


def outputs_alone(call, net, x, rank):
    _, rest = call(x)
    return (rest["bias"] + rest["again"][1]) * x.mean()


LOSSES = [raw_output, temperature, weights_of_losses, penalty, on_one_rank_only, in_a_reentrant_checkpoint,
          outputs_alone]  # fmt: skip


def batch(rank, number):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * number + rank))


def means(net, loss, batches, size):
    """The mean over the ranks of each gradient, for the batches of one step; None where no rank has one."""
    sums = [None] * len([*net.parameters()])
    for rank in range(size):
        bare = copy.deepcopy(net)
        for number in batches:
            loss(bare, bare, batch(rank, number), rank).backward()
        for place, param in enumerate(bare.parameters()):
            if param.grad is not None:
                sums[place] = param.grad / size + (0 if sums[place] is None else sums[place])
    return sums


def assert_gradients(net, expected, text):
    for (name, param), mean in zip(net.named_parameters(), expected, strict=True):
        if mean is None:
            assert param.grad is None, (text, name)
        else:
            torch.testing.assert_close(param.grad, mean, msg=lambda why: f"{text} {name}: {why}")  # noqa: B023


def with_marks(*quick):
    """All faces; those that are not among the quick ones are slow."""
    return [pytest.param(face, marks=() if face in quick else pytest.mark.slow) for face in FACES]


@pytest.mark.parametrize("face", with_marks("paddle", "private", "accumulating"))
def test_parameters_that_are_ready_before_any_output_are_averaged(rank, size, face):
    for loss in LOSSES:
        bare = Net()
        model = FACES[face](Net())
        for step in range(STEPS):
            model.zero_grad()
            loss(model, model.module, batch(rank, step), rank).backward()
            assert_gradients(model.module, means(bare, loss, [step], size), f"{loss.__name__}, step {step},")


@pytest.mark.parametrize("backward_outside", [False, True], ids=["", "backward outside of no_sync"])
@pytest.mark.parametrize("face", with_marks("paddle"))
def test_so_they_are_where_gradients_accumulate(rank, size, face, backward_outside):
    for loss in LOSSES:
        bare = Net()
        model = FACES[face](Net())
        for step in range(STEPS):
            model.zero_grad()
            numbers = range(3 * step, 3 * step + 3)
            for number in numbers:
                last = number == numbers[-1]
                with nullcontext() if last else model.no_sync():
                    value = loss(model, model.module, batch(rank, number), rank)
                    if not backward_outside:
                        value.backward()
                if backward_outside:
                    value.backward()
                if not last and face != "accumulating":
                    local = copy.deepcopy(bare)
                    for each in range(numbers[0], number + 1):
                        loss(local, local, batch(rank, each), rank).backward()
                    expected = [param.grad for param in local.parameters()]
                    assert_gradients(model.module, expected, f"{loss.__name__}, batch {number}, local,")
            assert_gradients(model.module, means(bare, loss, numbers, size), f"{loss.__name__}, step {step},")


def test_a_temperature_beside_features_of_all_ranks_is_averaged(rank, size):
    """As for CLIP: each rank compares its own features with those of all ranks, by a temperature outside."""

    def loss(features, net, here):
        return (features[here] @ features.flatten(0, 1).T * net.scale.exp() + net.bias).logsumexp(1).mean()

    net = Net()
    model = dpfuse.DistributedDataParallel(Net(), find_unused_parameters=True)
    for step in range(STEPS):
        model.zero_grad()
        features = FromAllRanks.apply(model(batch(rank, step))[0], rank)
        loss(features, model.module, rank).backward()
        sums = None
        for here in range(size):
            bare = copy.deepcopy(net)
            own = [bare(batch(each, step))[0] for each in range(size)]
            parts = torch.stack([part if each == here else part.detach() for each, part in enumerate(own)])
            loss(parts, bare, here).backward()
            found = [None if param.grad is None else param.grad / size for param in bare.parameters()]
            pairs = zip(sums or found, found, strict=True)
            sums = found if sums is None else [None if new is None else old + new for old, new in pairs]
        assert_gradients(model.module, sums, f"step {step}")


def test_two_models_use_the_parameters_of_each_other(rank, size):
    """One loss of two wrapped models; the temperature of each scales the other's outputs."""

    def loss(one, two, first, second, x):
        return (one(x)[0] * second.scale + two(x)[0] * first.scale).square().mean() + first.bias * second.bias

    nets = Net(), Net()
    models = [dpfuse.DataParallel(Net(), find_unused_parameters=True) for _ in nets]
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
        loss(*models, *(model.module for model in models), batch(rank, step)).backward()
        copies = [[copy.deepcopy(net) for net in nets] for _ in range(size)]
        for each, (one, two) in enumerate(copies):
            loss(one, two, one, two, batch(each, step)).backward()
        for place, model in enumerate(models):
            parts = [[param.grad for param in pair[place].parameters()] for pair in copies]
            expected = [None if part[0] is None else sum(part) / size for part in zip(*parts, strict=True)]
            assert_gradients(model.module, expected, f"model {place}, step {step}")


@pytest.mark.parametrize("name", ["scale", "bias", "layers.0.weight", "layers.2.bias", "layers.4.weight"])
def test_a_penalty_may_have_a_backward_of_its_own_before_that_of_the_outputs(rank, size, name):
    """A penalty has a backward of its own, between the forward and the backward of the outputs."""

    def steps(call, net, x):
        value = temperature(call, net, x, rank)
        net.get_parameter(name).square().sum().backward()
        value.backward()

    model = dpfuse.DataParallel(Net(), comm_buffer_size=1e-4, find_unused_parameters=True)
    for step in range(STEPS):
        model.zero_grad()
        steps(model, model.module, batch(rank, step))
        parts = []
        for each in range(size):
            bare = Net()
            steps(bare, bare, batch(each, step))
            parts.append([param.grad for param in bare.parameters()])
        expected = [None if part[0] is None else sum(part) / size for part in zip(*parts, strict=True)]
        assert_gradients(model.module, expected, f"step {step}")


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("planted")


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=str)
def test_a_backward_that_dies_before_it_reaches_an_output_is_named_and_training_goes_on(rank, size, failing):
    """A backward dies behind a temperature, and before it reaches an output."""
    model = dpfuse.DataParallel(Net(), find_unused_parameters=True)
    for step in range(STEPS):
        model.zero_grad()
        temperature(model, model.module, batch(rank, step), rank).backward()
    model.zero_grad()
    features, _ = model(batch(rank, STEPS))
    features = Breaks.apply(features) if rank in failing else features
    with pytest.raises(KeyError if rank in failing else dpfuse.DPFuseError):
        (features * model.module.scale.exp()).square().mean().backward()
    model.zero_grad()
    temperature(model, model.module, batch(rank, 9), rank).backward()
    assert_gradients(model.module, means(Net(), temperature, [9], size), "after it")


def sent_before_the_end(rank, size):
    """How many buckets have left when backward comes to the first layer, in each step."""
    net = Net()
    for unused in (net.scale, net.bias, net.weights):
        unused.requires_grad_(False)
    net.temperature = nn.Linear(1, 1, bias=False)
    model = dpfuse.DataParallel(net, comm_buffer_size=1e-4, last_comm_buffer_size=1e-5, plan="greedy")
    assert model.bucket_plan.specs[model.bucket_plan.buckets[0].params[-1]].name == "temperature.weight"
    early = []
    for step in range(6):
        model.zero_grad()
        with Operations() as done:
            features, _ = model(batch(rank, step))
            handle = model.module.layers[0].weight.register_hook(lambda _: early.append(len(done.collectives)))
            (features * net.temperature.weight.exp()).square().mean().backward()
            handle.remove()
    return early


def test_buckets_leave_during_backward_once_early_parameters_are_known(ranks):
    for early in ranks(sent_before_the_end):
        assert early[0] == 0, "the first backward is recorded"
        assert early[1] == 0, "a bucket with an early entry waits for the end"
        assert min(early[2:]) >= 1
