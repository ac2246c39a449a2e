"""Buffers whose memory another tensor of the program shares: losses that read it are those of torch's class."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import dpfuse
from tests.torch_ddp import TORCH, TorchDDP

FACES = {
    "paddle": partial(dpfuse.DataParallel, broadcast_buffers=True),
    "torch": dpfuse.DistributedDataParallel,
}


class Net(nn.Module):
    """Batch norm, and a center that moves with the outputs of each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("pair", torch.zeros(4))
        self.register_buffer("tail", self.pair[2:])

    def forward(self, x):
        out = self.last(self.norm(self.layer(x)))
        with torch.no_grad():
            self.center.mul_(0.5).add_(out.mean(0))
            self.pair[2:].add_(out.std(0))
        return out


class Loss(nn.Module):
    """Reads what it was given, and moves it, alike on all ranks."""

    def __init__(self, center, tail):
        super().__init__()
        self.center, self.tail = center, tail

    def forward(self, out):
        return (out - self.center - self.tail).square().sum()

    @torch.no_grad()
    def move(self):
        self.center += 0.25
        self.tail *= 0.5


ALIASES = {
    "same": lambda net: (net.center, net.tail),
    "detach": lambda net: (net.center.detach(), net.tail.detach()),
    "data": lambda net: (net.center.data, net.pair.data[2:]),
    "view": lambda net: (net.center.view(1, 2), net.pair.view(2, 2)[1:]),
    "state_dict": lambda net: (net.state_dict()["center"], net.state_dict()["tail"]),
    "numpy": lambda net: (torch.from_numpy(net.center.numpy()), torch.from_numpy(net.tail.numpy())),
    "buffer of the loss": lambda net: (nn.Buffer(net.center), nn.Buffer(net.tail)),
    "two views of one memory": lambda net: (net.center[:], net.pair[2:]),
}


def plain(model, loss, x, y):
    loss(model(x)).backward()
    return []


def kept_graph(model, loss, x, y):
    value = loss(model(x.requires_grad_()))
    value.backward(retain_graph=True)
    return torch.autograd.grad(value, x)


def two_forwards(model, loss, x, y):
    """The buffers arrive while the graph of the first forward has them."""
    first, second = loss(model(x)), loss(model(y))
    (first + 2 * second).backward()
    return []


def accumulated(model, loss, x, y):
    with model.no_sync():
        loss(model(x)).backward()
    loss(model(y)).backward()
    return []


WAYS = [plain, kept_graph, two_forwards, accumulated]


def train(model, rank, alias, way, first):
    """Return the losses, the gradients, and what the alias shows after each forward."""
    optimizer, seen, loss = torch.optim.SGD(model.parameters(), lr=0.05), [], None
    for step in range(5):
        if step == first:
            loss = Loss(*ALIASES[alias](model.module))
        optimizer.zero_grad()

        def read(out, loss=loss, seen=seen):
            value = out.square().sum() if loss is None else loss(out)
            seen.append(value.detach().clone())
            seen.extend([] if loss is None else [loss.center.clone(), loss.tail.clone()])
            return value

        batches = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        seen += way(model, read, *batches)
        optimizer.step()
        seen += [param.grad.clone() for param in model.parameters()]
        if loss is not None:
            loss.move()
    return seen


def beside_torch(rank, size, face, alias, way, first):
    theirs = train(TorchDDP(Net()), rank, alias, way, first)
    ours = train(FACES[face](Net()), rank, alias, way, first)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other) if size == 2 else torch.allclose(one, other, rtol=1e-4, atol=1e-5), number


@pytest.mark.one_in(6)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alias", ALIASES)
def test_losses_and_gradients_are_those_of_torch(ranks, alias, way, face):
    if way is two_forwards and TORCH < (2, 12):
        pytest.skip("torch's class marks what a graph holds as written")
    ranks(beside_torch, face, alias, way, 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("alias", ["detach", "view", "state_dict"])
def test_so_they_are_where_the_tensor_is_made_later(ranks, alias, face):
    ranks(beside_torch, face, alias, kept_graph, 1)


def test_so_they_are_on_three_ranks(ranks):
    ranks(beside_torch, "torch", "detach", plain, 0, size=3)


@pytest.mark.parametrize("face", FACES)
def test_a_kept_graph_over_the_tensor_itself_has_the_value_that_it_saw(rank, size, face):
    """Torch's class sends before the next forward, so what is computed from the graph before it is the same there."""
    results = []
    for wrap in (TorchDDP, FACES[face]):
        model, grads = wrap(Net()), []
        kept = model.module.center.detach()
        for step in range(3):
            model.zero_grad()
            x = (torch.eye(4, 3) * (1.0 + rank + step)).requires_grad_()
            value = (model(x) * kept * model.module.center.view(1, 2)).sum()
            value.backward(retain_graph=True)
            grads += [*torch.autograd.grad(value, x), *(param.grad.clone() for param in model.parameters())]
        results.append(grads)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
