"""Buffers that the graph of a forward still needs when rank 0's arrive: gradients are those of the values it saw.

Each rank's gradients are compared with those of one process that computes the batches of all ranks, with the buffers
that each of them had.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import dpfuse
from tests.torch_ddp import TorchDDP

FACES = {
    "paddle": partial(dpfuse.DataParallel, broadcast_buffers=True),
    "torch": dpfuse.DistributedDataParallel,
    "small buckets": partial(dpfuse.DataParallel, comm_buffer_size=1e-5, broadcast_buffers=True),
}
STEPS = 3


def layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


class Rebound(nn.Module):
    """Each forward puts a new tensor in the place of its buffer, and the graph saves that tensor."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        out = self.layers(x)
        self.scale = 0.5 * self.scale + out.detach().abs().mean(0)
        return out / self.scale


class InPlace(Rebound):
    """Each forward writes into its buffer, before the graph saves it."""

    def forward(self, x):
        out = self.layers(x)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(out.abs().mean(0))
        return out / self.scale.clone()


class Viewed(Rebound):
    """The graph saves views of the buffer, as a frozen batch norm does."""

    def forward(self, x):
        out = self.layers(x)
        self.scale = 0.5 * self.scale + out.detach().abs().mean(0)
        return out / self.scale.view(1, 4) * self.scale.detach().reshape(1, -1)[:, :4]


class EvalNorm(nn.Module):
    """Batch norm in training mode, then in eval mode, whose backward needs the running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        out = self.layers(x)
        self.norm.train()(out.detach())
        return self.norm.eval()(out)


class Divide(torch.autograd.Function):
    """Saves the buffer itself."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x / scale

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient / scale, None


class OwnFunction(Rebound):
    """A user's autograd function saves the buffer."""

    def forward(self, x):
        out = self.layers(x)
        self.scale = 0.5 * self.scale + out.detach().abs().mean(0)
        return Divide.apply(out, self.scale)


class TwoPlaces(Rebound):
    """One tensor is a buffer of two modules, and an attribute."""

    def __init__(self):
        super().__init__()
        self.child = nn.Module()
        self.child.register_buffer("scale", self.scale)
        self.same = self.scale

    def forward(self, x):
        assert self.same is self.scale is self.child.scale
        out = self.layers(x) / self.child.scale
        self.scale = self.child.scale = self.same = self.scale * 0.9 + out.detach().abs().mean(0)
        return out * self.scale


class NormOnce(nn.Module):
    """Running statistics, which C++ writes and torch does not count. The graph saves a view of them, and themselves."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        out = self.layers(x)
        nn.functional.batch_norm(out.detach(), self.mean, self.var, training=True)
        return (out - self.mean) * self.var.view(1, 4) * self.mean


MODULES = [Rebound, InPlace, Viewed, EvalNorm, OwnFunction, TwoPlaces, NormOnce]
# What a program keeps of the buffers, as tensors that are to show their values.
KEPT = {
    "nothing": lambda net: [],
    "names": lambda net: list(net.buffers()),
    "state_dict": lambda net: [net.state_dict()[name] for name, _ in net.named_buffers()],
    "views": lambda net: [buffer.view_as(buffer) for buffer in net.buffers()],
    "numpy": lambda net: [torch.from_numpy(buffer.numpy()) for buffer in net.buffers()],
}


def batch(rank, number):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(50 * number + rank))


def both_losses_of_one_forward(call, get, sync):
    out = call(get(0))
    out.square().mean().backward(retain_graph=True)
    sync()
    out.abs().mean().backward()
    sync()


def two_forwards_then_two_backwards(call, get, sync):
    one, two = call(get(0)).square().mean(), call(get(1)).abs().mean()
    one.backward()
    sync()
    two.backward()
    sync()


def one_of_two_backwards_first(call, get, sync):
    """A pipeline's order: the second forward comes between the forward and the backward of the first."""
    one = call(get(0)).square().mean()
    two = call(get(1)).abs().mean()
    two.backward()
    sync()
    three = call(get(2)).square().mean()
    one.backward()
    sync()
    three.backward()
    sync()


def gradient_penalty(call, get, sync):
    x = get(0).requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + slope.square().mean()).backward()
    sync()


def input_gradient_after_backward(call, get, sync):
    x = get(0).requires_grad_()
    out = call(x)
    out.square().mean().backward(retain_graph=True)
    sync()
    x.grad = None
    (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (out * slope.mean()).abs().mean().backward()
    sync()


WAYS = [
    both_losses_of_one_forward,
    two_forwards_then_two_backwards,
    one_of_two_backwards_first,
    gradient_penalty,
    input_gradient_after_backward,
]


class InTurns:
    """One process that computes for all ranks, and sends rank 0's buffers when the wrapper does.

    That is after each backward, and before a forward if none came since the forward before.
    """

    def __init__(self, nets):
        self.nets = nets
        self.fresh = [False] * len(nets)

    def run(self, way, step):
        """Do `way` for each rank, in threads that wait for each other wherever buffers are sent."""
        barrier = threading.Barrier(len(self.nets), action=self.send, timeout=60)
        with ThreadPoolExecutor(len(self.nets)) as pool:
            futures = [pool.submit(self.part, way, step, rank, barrier) for rank in range(len(self.nets))]
        for future in futures:
            future.result()

    def part(self, way, step, rank, barrier):
        def call(x):
            if not self.fresh[rank]:
                barrier.wait()
            self.fresh[rank] = False
            return self.nets[rank](x)

        def sync():
            barrier.wait()
            self.fresh[rank] = True

        try:
            way(call, lambda number: batch(rank, 10 * step + number), sync)
        except BaseException:
            barrier.abort()
            raise

    def send(self):
        """Rank 0's buffers, as new tensors, so that no graph is touched."""
        for net in self.nets[1:]:
            new = {}
            for mine, own in zip(self.nets[0].modules(), net.modules(), strict=True):
                for name, buffer in mine._buffers.items():
                    own._buffers[name] = new.setdefault(id(buffer), buffer.clone())
            if isinstance(net, TwoPlaces):
                net.same = net.scale


def compare(rank, size, make, way, face, keep="nothing"):
    model = FACES[face](make())
    kept = []
    turns = InTurns([make() for _ in range(size)])
    for step in range(STEPS):
        model.zero_grad()
        way(model, lambda number: batch(rank, 10 * step + number), lambda: None)  # noqa: B023
        for net in turns.nets:
            net.zero_grad()
        turns.run(way, step)
        grads = [[param.grad for param in net.parameters()] for net in turns.nets]
        for param, each in zip(model.module.parameters(), zip(*grads, strict=True), strict=True):
            torch.testing.assert_close(param.grad, sum(each) / size)
        expected = dict(turns.nets[0].named_buffers(remove_duplicate=False))
        for name, buffer in model.module.named_buffers(remove_duplicate=False):
            torch.testing.assert_close(buffer, expected[name])
        for tensor, buffer in zip(kept, model.module.buffers(), strict=bool(kept)):
            assert torch.equal(tensor, buffer)
        kept = kept or KEPT[keep](model.module)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODULES)
def test_gradients_are_those_of_the_buffers_that_the_forward_saw(ranks, make, way):
    ranks(compare, make, way, "torch")


@pytest.mark.parametrize("face", ["paddle", "small buckets"])
@pytest.mark.parametrize("make", [Rebound, EvalNorm])
def test_so_they_are_for_other_wrappers(ranks, make, face):
    ranks(compare, make, one_of_two_backwards_first, face)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [EvalNorm, NormOnce])
@pytest.mark.parametrize("keep", [*KEPT][1:])
def test_so_they_are_where_a_program_keeps_tensors_of_the_same_memory(ranks, keep, make, way):
    ranks(compare, make, way, "paddle" if keep == "views" else "torch", keep)


def test_so_they_are_on_three_ranks(ranks):
    ranks(compare, Viewed, both_losses_of_one_forward, "torch", size=3)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = layers(), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layers(x))


def of_rank_0(buffer):
    value = buffer.clone()
    torch.distributed.broadcast(value, 0)
    return value


def scripted():
    return torch.jit.script(Norm())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [Norm, scripted])
def test_where_no_graph_holds_them_buffers_stay_the_same_tensors(rank, size, make):
    model = FACES["torch"](make())
    buffers = dict(model.module.named_buffers())
    for step in range(4):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        for name, buffer in model.module.named_buffers():
            assert buffer is buffers[name], name
            assert torch.equal(buffer, of_rank_0(buffer)), name


class Sharing(nn.Module):
    """Two buffers, and an attribute, are parts of one tensor."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.register_buffer("both", torch.ones(8))
        self.register_buffer("scale", self.both[:4])
        self.shift = self.both[4:]

    def forward(self, x):
        out = self.layers(x)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(out.abs().mean(0))
            self.shift.add_(1 + x.mean())
        return out * self.scale + self.shift


def test_buffers_that_share_memory_go_on_sharing_it_and_a_graph_keeps_its_values(rank, size):
    model, theirs = FACES["torch"](Sharing()), TorchDDP(Sharing())
    net = model.module
    for step in range(3):
        for each in (model, theirs):
            each.zero_grad()
            out = each(batch(rank, step))
            out.square().sum().backward(retain_graph=step > 0)
            if step > 0:
                out.abs().sum().backward()
        assert net.scale.data_ptr() == net.both.data_ptr()
        assert net.shift.tolist() == net.both[4:].tolist() == of_rank_0(net.both)[4:].tolist()
        for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(ours.grad, of_rank_0(ours.grad))
            if step == 0:
                assert torch.equal(ours.grad, other.grad)


class Marked(nn.Module):
    """Its buffers are of torch.nn.Buffer, one of them not saved."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.scale = nn.Buffer(torch.ones(4))
        self.shift = nn.Buffer(torch.zeros(4), persistent=False)

    def forward(self, x):
        out = self.layers(x)
        with torch.no_grad():
            self.scale.add_(out.abs().mean(0))
            self.shift.add_(out.mean(0))
        return out * self.scale.clone() + self.shift.clone()


def test_a_buffer_with_other_memory_has_its_marks(rank, size):
    model = FACES["torch"](Marked())
    for step in range(2):
        out = model(batch(rank, step))
        weight = torch.ones(4, requires_grad=True)
        other = weight * model.module.scale + (weight * model.module.shift).square()
        before, expected = model.module.scale, model.module.scale + 2 * model.module.shift.square()
        out.sum().backward()
        assert model.module.scale is before
        other.sum().backward()
        torch.testing.assert_close(weight.grad, expected)
    assert {"scale", "shift"} & {*model.module.state_dict()} == {"scale"}
    assert isinstance(model.module.scale, nn.Buffer)
    assert isinstance(model.module.shift, nn.Buffer)
    assert not model.module.shift.persistent
    assert torch.equal(model.module.shift, of_rank_0(model.module.shift))
