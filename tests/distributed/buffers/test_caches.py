"""Buffers that are caches: a rank with longer inputs has larger ones, or has them alone. Training goes on.

Gradients are compared with one process that computes the batches of all ranks, and running statistics beside the
caches with rank 0's.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

FACES = {
    "paddle": partial(dpfuse.DataParallel, broadcast_buffers=True),
    "torch": dpfuse.DistributedDataParallel,
    "not sent": dpfuse.DataParallel,
}
# Of rank 0 and rank 1, in each step: alike, one of them longer, shorter than before, and alike again.
LENGTHS = [(3, 3), (3, 7), (9, 4), (5, 5), (9, 9), (11, 11), (2, 12)]


class Net(nn.Module):
    """A norm whose statistics are rank 0's, and a cache that depends on nothing but the length of the input."""

    def __init__(self, persistent=False):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Module()
        self.prepare(persistent)

    def prepare(self, persistent):
        """Make the cache, if it exists at the start."""

    def cache(self, length):
        raise NotImplementedError

    def forward(self, x):
        return self.norm(self.layers(x * self.cache(len(x))))


class Registered(Net):
    """None at first, and registered anew whenever it is too short."""

    def prepare(self, persistent):
        self.register_buffer("positions", None, persistent=False)

    def cache(self, length):
        if self.positions is None or len(self.positions) < length:
            self.register_buffer("positions", torch.arange(1.0, length + 1)[:, None] / 9, persistent=False)
        return self.positions[:length]


class Assigned(Net):
    """It exists at the start, and a longer one is assigned."""

    def prepare(self, persistent):
        self.inner.register_buffer("angles", torch.arange(1.0, 4.0)[:, None] / 9, persistent=persistent)

    def cache(self, length):
        if len(self.inner.angles) < length:
            self.inner.angles = torch.arange(1.0, length + 1)[:, None] / 9
        return self.inner.angles[:length]


class AsLong(Net):
    """It is made anew whenever the length changes, and is removed for a length of 5."""

    def cache(self, length):
        if length == 5:
            self.inner._buffers.pop("mask", None)
            return torch.ones(5, 1)
        if len(getattr(self.inner, "mask", ())) != length:
            self.inner.register_buffer("mask", torch.ones(length, 1).tril() / 3)
        return self.inner.mask


class InInference(Assigned):
    """A validation under inference mode grows it, on one rank more than on the other, and counts."""

    def prepare(self, persistent):
        super().prepare(persistent)
        self.inner.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.inner.seen = self.inner.seen + 1
        return self.norm(self.layers(x + self.cache(len(x))))


CACHES = [Registered, Assigned, partial(Assigned, persistent=True), AsLong]


def batch(rank, step, length):
    return torch.randn(length, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def of_rank_0(buffer):
    value = buffer.clone()
    dist.broadcast(value, 0)
    return value


def assert_step(model, make, rank, size, step, lengths):
    model.zero_grad()
    model(batch(rank, step, lengths[rank])).square().mean().backward()
    grads = []
    for each in range(size):
        bare = make()
        bare(batch(each, step, lengths[each])).square().mean().backward()
        grads.append([param.grad for param in bare.parameters()])
    for param, every in zip(model.module.parameters(), zip(*grads, strict=True), strict=True):
        torch.testing.assert_close(param.grad, sum(every) / size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("make", CACHES, ids=["registered", "assigned", "saved", "as long as the input"])
def test_caches_that_differ_between_ranks_are_left_to_each_rank(rank, size, make, face):
    model = FACES[face](make())
    for step, lengths in enumerate(LENGTHS):
        assert_step(model, make, rank, size, step, lengths)
        if face != "not sent":
            for name, buffer in model.module.norm.named_buffers():
                assert torch.equal(buffer, of_rank_0(buffer)), (step, name)


@pytest.mark.parametrize("face", FACES)
def test_buffers_that_were_made_in_inference_mode_train(rank, size, face):
    model = FACES[face](InInference())
    for step, lengths in enumerate(LENGTHS[:4]):
        if step % 2 == 0:
            model.eval()
            with torch.inference_mode():
                for _ in range(1 + rank):
                    model(batch(rank, 70 + step, 8 + rank * step))
            model.train()
            assert model.module.inner.seen.is_inference()
        assert_step(model, InInference, rank, size, step, lengths)
        if face != "not sent":
            assert model.module.inner.seen.item() == 2 + step + step // 2
            for name, buffer in model.module.norm.named_buffers():
                assert torch.equal(buffer, of_rank_0(buffer)), (step, name)


def test_a_cache_may_grow_inside_no_sync(rank, size):
    model = FACES["torch"](Assigned())
    for step in range(4):
        model.zero_grad()
        lengths = [(3 + 2 * step + each * (step == 2), 4 + step * each) for each in range(3)]
        for number, pair in enumerate(lengths):
            with model.no_sync(enabled=number < 2):
                model(batch(rank, 3 * step + number, pair[rank])).square().mean().backward()
        grads = []
        for each in range(size):
            bare = Assigned()
            for number, pair in enumerate(lengths):
                bare(batch(each, 3 * step + number, pair[each])).square().mean().backward()
            grads.append([param.grad for param in bare.parameters()])
        for param, every in zip(model.module.parameters(), zip(*grads, strict=True), strict=True):
            torch.testing.assert_close(param.grad, sum(every) / size)


def late_statistics(rank, size, first):
    """Running statistics come on one rank some steps after the other; then they are rank 0's."""
    model = FACES["torch"](Registered())
    seen = []
    for step in range(7):
        if step == (2 if rank == first else 4):
            model.module.inner.register_buffer("mean", torch.full((3,), float(rank + 1)))
        model.zero_grad()
        model(batch(rank, step, 3)).square().mean().backward()
        seen.append(getattr(model.module.inner, "mean", torch.zeros(3)).tolist())
    return seen


@pytest.mark.parametrize("first", [0, 1])
def test_a_buffer_that_ranks_get_one_after_the_other_is_rank_0s_once_all_have_it(ranks, first):
    zero, one = ranks(late_statistics, first)
    own = zero if first == 0 else one
    assert own[2:4] == [[first + 1.0] * 3] * 2
    assert zero[4:] == one[4:] == [[1.0] * 3] * 3


def warmed_up(rank, size, face, persistent):
    """A forward before wrapping has made caches of other lengths."""
    net = Assigned(persistent)
    net(torch.ones(3 + 2 * rank, 6))
    net.norm.reset_running_stats()
    return FACES[face](net)


@pytest.mark.parametrize("face", FACES)
def test_caches_may_differ_when_the_module_is_wrapped(rank, size, face):
    model = warmed_up(rank, size, face, persistent=False)
    for step, lengths in enumerate(LENGTHS[:4]):
        assert_step(model, Assigned, rank, size, step, lengths)


@pytest.mark.parametrize("face", FACES)
def test_saved_buffers_that_differ_when_the_module_is_wrapped_are_an_error(rank, size, face):
    with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 has 'buffer inner.angles shape=\(5, 1\)"):
        warmed_up(rank, size, face, persistent=True)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_copies_train_with_caches_that_differ(rank, size, way):
    """A copy goes on with the caches that differ."""
    model = FACES["torch"](Assigned())
    for step, lengths in enumerate(LENGTHS[:3]):
        assert_step(model, Assigned, rank, size, step, lengths)
    model = way(model)
    for step, lengths in enumerate(LENGTHS):
        assert_step(model, Assigned, rank, size, step, lengths)
        for name, buffer in model.module.norm.named_buffers():
            assert torch.equal(buffer, of_rank_0(buffer)), (step, name)
