"""Models, and what the tests of gradients that are reduced in place have in common."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from time import monotonic, sleep
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.engine import assembly
from dpfuse.engine.exchanges import in_place
from dpfuse.engine.exchanges.in_place import InPlace
from dpfuse.engine.torch_private import is_private
from tests.distributed.failures.test_interruptions import Fuse
from tests.patience import patience

ALL, MATRICES, NONE = 1, 50, 1 << 60  # bytes from which a gradient is large


@contextmanager
def large_from(nbytes, *, copies=True):
    """Reduce private gradients of so many bytes in place. Copy smaller ones, as on a GPU, or keep them in a buffer."""
    with mock.patch.object(in_place, "LARGE", nbytes), copied() if copies else nullcontext():
        yield


def copied():
    """Give private gradients memory of their own, as on a GPU: there, none of them lies in a buffer."""
    return mock.patch.object(assembly, "COUNTS_REFERENCES", False)


def ways(model):
    """Per large parameter, whether its last gradient was reduced in place."""
    exchanges = [bucket.parts.exchange for bucket in model.reducer.buckets]
    return {one.name: one.in_place for each in exchanges if isinstance(each, InPlace) for one in each._each}


def let_go(model):
    """Wait until the process group's threads have let go of gradients that are kept: a moment after the all-reduce."""
    began = monotonic()
    for param in model.parameters():
        while param.grad is not None and not is_private(param.grad):
            assert monotonic() < began + patience(20)
            sleep(0.001)


def mean_over_ranks(local, size):
    total = (local / size).contiguous()
    dist.all_reduce(total)
    return total


def batch(rank, step, width=6, dtype=torch.float32):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def each_alone(module, **options):
    """With a bucket per parameter, the last registered sent first; so most of them are sent while backward runs."""
    return dpfuse.DistributedDataParallel(module, bucket_cap_mb=1e-9, **options)


def twice(scenario, *args):
    """The gradients that `scenario` returns, with all in place where they may be, some beside a buffer, and none."""
    results = []
    for threshold in (ALL, MATRICES, NONE):
        with large_from(threshold, copies=threshold != MATRICES):
            torch.manual_seed(0)
            results.append(scenario(*args))
    for *others, expected in zip(*results, strict=True):
        for got in others:
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)


def grads(module):
    return [None if param.grad is None else param.grad.detach().clone() for param in module.parameters()]


def with_all_large(rank, size, function, *args):
    with large_from(ALL):
        function(rank, size, *args)


class Mlp(nn.Module):
    """On both sides of 2 MB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 740), nn.Tanh(), nn.Linear(740, 740), nn.Tanh(), nn.Linear(740, 3))

    def forward(self, x, step):
        return self.layers(x)


class Mixed(nn.Module):
    """With gradients that travel in place, that are packed as soon as they are ready, and small ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 740), nn.Linear(740, 740), nn.Tanh(), nn.Linear(740, 90))

    def forward(self, x, step):
        return self.layers(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.outer.weight = self.inner.weight

    def forward(self, x, step):
        return self.head(torch.tanh(self.outer(torch.tanh(self.inner(x)))))


class Shared(nn.Module):
    """The gradient of `early` is the memory that the backward of `late` still reads."""

    def __init__(self):
        super().__init__()
        self.late, self.early = nn.Linear(6, 4), nn.Parameter(torch.randn(20))

    def forward(self, x):
        return torch.tanh(self.late(x) + self.early.view(5, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.spare = nn.Parameter(torch.ones(4, 4))

    def forward(self, x, blow=False):
        for index, layer in enumerate(self.layers):
            x = Fuse.apply(layer(x), blow and index == 1)
        return x


def right_steps(model, rank, size):
    for step in range(3):
        bare = copy.deepcopy(model.module)
        for one in (bare, model):
            one.zero_grad()
            one(batch(rank, step, 4)).sum().backward()
        for param, alone in zip(model.module.layers.parameters(), bare.layers.parameters(), strict=True):
            assert torch.equal(param.grad, mean_over_ranks(alone.grad, size))
        assert model.module.spare.grad is None
    assert {name for name, in_place in ways(model).items() if not in_place} == {"spare"}
