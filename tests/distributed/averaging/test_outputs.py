"""What a program does with outputs: containers with cycles, changes in place, saving. Gradients stay the mean."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfuse
from dpfuse import DataParallel, DistributedDataParallel

FACES = {"data_parallel": DataParallel, "ddp": DistributedDataParallel}


class Net(nn.Module):
    def __init__(self, pack=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6))
        self.pack = pack

    def forward(self, x):
        return self.pack(self.layers(x))


def data(rank, step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank, size, face, pack, loss, name):
    """Three steps, of which the second is local, against one process with the batches of all ranks."""
    model, bare = FACES[face](Net(pack)), Net(pack)
    for step in range(3):
        model.zero_grad()
        bare.zero_grad()
        with model.no_sync(enabled=step == 1):
            loss(model(data(rank, step))).backward()
        for each in [rank] if step == 1 else range(size):
            (loss(bare(data(each, step))) / (1 if step == 1 else size)).backward()
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text: f"{name}: {text}")
    assert model.reducer.completed == 2, name


@dataclasses.dataclass(eq=False)
class Node:
    value: Any
    parent: Any = None
    children: Any = dataclasses.field(default_factory=list)


def tree(y):
    root = Node(y[:, :3])
    root.children = [Node(y[:, 3:], root)]
    return root


def dict_in_itself(y):
    out = {"y": y}
    out["self"] = out
    return out


def list_in_itself(y):
    out = [y]
    out.append((out,))
    return out


def deep(y):
    out = [y]
    for _ in range(10_000):
        out = [out]
    return out


def at_the_bottom(out):
    while isinstance(out, list):
        out = out[0]
    return out


@dataclasses.dataclass(slots=True)
class Slots:
    """One field is never set."""

    y: Any
    late: Any = dataclasses.field(init=False)


class Raises(dict):
    """Its values are computed when they are asked for, which here fails."""

    def values(self):
        raise ZeroDivisionError("of the program")

    __iter__ = items = values


NODE = Raises(y=1)
CONTAINERS = {
    "tree": (tree, lambda out: out.value.square().mean() + out.children[0].value.abs().mean()),
    "dict in itself": (dict_in_itself, lambda out: out["self"]["y"].square().mean()),
    "list in itself": (list_in_itself, lambda out: out[0].square().mean()),
    "deep": (deep, lambda out: at_the_bottom(out).square().mean()),
    "slots": (Slots, lambda out: out.y.square().mean()),
    "a dict that raises": (lambda y: Raises(y=y), lambda out: out["y"].square().mean()),
    "weak proxy": (lambda y: (y, weakref.proxy(NODE)), lambda out: out[0].square().mean()),
    "namespace": (lambda y: SimpleNamespace(y=y), lambda out: out.y.square().mean()),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda out: out.log_prob(torch.ones(6)).mean()),
    "generator": (lambda y: (part for part in [y]), lambda out: next(out).square().mean()),
    "values of a dict": (lambda y: {"y": y}.values(), lambda out: next(iter(out)).square().mean()),
    "sparse": (lambda y: y.to_sparse(), lambda out: out.to_dense().square().mean()),
}


@pytest.mark.parametrize("face", FACES)
def test_outputs_in_containers_of_every_kind_train(rank, size, face):
    for name, (pack, loss) in CONTAINERS.items():
        train(rank, size, face, pack, loss, name)


def in_place(out):
    out += 1
    out.clamp_(min=-0.5)
    out[0].mul_(3)
    out.retain_grad()
    return out.square().mean()


def of_two(out):
    y, flat, _ = out
    flat.mul_(2)
    y[:, 0] = 0
    return (y + flat.view_as(y)).square().mean()


def saved(out):
    torch.save(out, io.BytesIO())
    pickle.dumps(out)
    return out.square().mean()


def copied(out):
    copy.copy(out), copy.deepcopy(out.detach())
    return out.square().mean()


def with_own_hook(out):
    """A hook that is put on after a change in place gets the gradient of the new values."""
    out.mul_(2)
    seen = []
    out.register_hook(seen.append)
    loss = (3 * out).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(seen[0], torch.full_like(out, 3))
    return loss


def nested_backward(out):
    """A hook of the program runs a backward of its own."""
    weight = torch.ones(1, requires_grad=True)

    def run(_):
        with torch.enable_grad():
            (weight * 2).backward()

    out.register_hook(run)
    return out.square().mean()


def by_gradient_of_gradient(out):
    (first,) = torch.autograd.grad(out.square().sum(), out, create_graph=True)
    return first.square().mean() + out.mean()


CHANGES = {
    "plain": (lambda y: y, in_place),
    "view": (lambda y: y.view(-1, 3), in_place),
    "slice": (lambda y: y[:, :4], in_place),
    "transposed": (lambda y: y.t(), in_place),
    "chunks": (lambda y: y.chunk(2, 1), lambda out: (out[0] * 2 + out[1]).square().mean()),
    "twice": (lambda y: (y, y.view(-1), [y]), of_two),
    "saved": (lambda y: y, saved),
    "copied": (lambda y: y, copied),
    "nested backward": (lambda y: y, nested_backward),
    "gradient of the gradient": (lambda y: y, by_gradient_of_gradient),
    "in a checkpoint": (lambda y: y, lambda out: checkpoint(torch.square, out, use_reentrant=False).mean()),
    "in a reentrant checkpoint": (lambda y: y, lambda out: checkpoint(torch.square, out, use_reentrant=True).mean()),
}


@pytest.mark.parametrize("face", FACES)
def test_outputs_may_be_changed_and_saved(rank, size, face):
    for name, (pack, loss) in CHANGES.items():
        train(rank, size, face, pack, loss, name)


class Subclass(torch.Tensor):
    pass


def ignore(grad):
    """A hook of the program."""


def with_hook(y):
    y.register_hook(ignore)
    return y


@pytest.mark.parametrize("face", FACES)
def test_saving_outputs_warns_of_nothing_but_the_hooks_of_the_program(rank, size, face):
    kinds = {
        "plain": lambda y: y,
        "tuple": lambda y: (y, y.view(-1), [y]),
        "dict": lambda y: {"y": y, "more": {"z": y * 2}},
        "subclass": lambda y: y.as_subclass(Subclass),
        "hooked": with_hook,
    }
    for name, pack in kinds.items():
        model, bare = FACES[face](Net(pack)), Net(pack)
        texts = []
        for net in (bare, model):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.save(out := net(data(rank, 0)), file := io.BytesIO())
            texts.append([str(each.message)[:30] for each in caught])
            file.seek(0)
            read = torch.load(file, weights_only=False)
            pairs = zip(*map(dpfuse.engine.containers.tensors_in, (out, read)), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        assert texts[0] == texts[1], name


@pytest.mark.parametrize("face", FACES)
def test_a_hook_on_changed_outputs_gets_the_gradient_of_the_new_values(rank, size, face):
    model = FACES[face](Net())
    for step in range(2):
        with_own_hook(model(data(rank, step)))


@pytest.mark.parametrize("face", FACES)
def test_a_scaled_loss_can_be_saved(rank, size, face):
    model = FACES[face](Net())
    scaler = dpfuse.GradScaler("cpu", model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = scaler.scale(model(data(rank, 0)).square().mean())
        torch.save(loss, io.BytesIO())
    loss.backward()
    bare = Net()
    for each in range(size):
        (bare(data(each, 0)).square().mean() / size).backward()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("face", FACES)
def test_a_hook_of_the_program_that_raises_ends_one_step(rank, size, face):
    """A hook of one rank's program raises while backward runs; the next step is averaged again."""
    model, bare = FACES[face](Net()), Net()
    for step in range(4):
        model.zero_grad()
        out = model(data(rank, step))
        if step == 2:

            def fail(_):
                raise ZeroDivisionError("mine")

            out.register_hook(fail)
            with pytest.raises(ZeroDivisionError, match="mine"):
                out.square().mean().backward()
            continue
        out.square().mean().backward()
        bare.zero_grad()
        for each in range(size):
            (bare(data(each, step)).square().mean() / size).backward()
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
