"""Ranks with different numbers of forwards before an averaged backward: buffers travel at the same moments on all."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from tests.distributed.buffers.test_after_backward import of_rank_0, state_of

FACES = {
    "dp": lambda net, **options: dpfuse.DataParallel(net, broadcast_buffers=True, **options),
    "ddp": dpfuse.DistributedDataParallel,
}
COUNTS = [
    [(3, 2), (1, 4), (2, 2)],
    [(1, 4), (4, 1)],
    [(1, 2), (64, 1), (3, 3)],
]


class Net(nn.Module):
    """Buffers that a forward only writes, and one that it also uses."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, fails=False):
        if fails:
            raise KeyError("planted")
        x = self.first(x - self.center)
        if self.training:
            self.center.lerp_(x.detach().mean(0), 0.01)
            self.seen += 1
        return self.last(self.norm(x))


class Sums(nn.Module):
    """A linear model, whose gradient is the sum of its inputs, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen += 1
        return self.layer(x)


def batch(rank, step, number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 * step + 10 * number + rank))


def windows(rank, size, face, counts, one_backward, options, kind):
    """Each rank has `counts[step][rank]` batches; the gradient is that of all of them."""
    torch.manual_seed(0)
    model = FACES[face](kind(), **options)
    for step, by_rank in enumerate(counts):
        model.zero_grad()
        model.set_gradient_weight(by_rank[rank], reduction="sum")
        loss = 0
        for number in range(by_rank[rank]):
            local = not one_backward and number < by_rank[rank] - 1
            with model.no_sync() if local else nullcontext():
                value = model(batch(rank, step, number)).sum()
                if one_backward:
                    loss = loss + value
                else:
                    value.backward()
        if one_backward or not by_rank[rank]:
            (loss if by_rank[rank] else sum(param.sum() for param in model.parameters()) * 0).backward()
        assert torch.equal(state_of(model), of_rank_0(state_of(model)))
        if kind is Sums:
            rows = [batch(other, step, number) for other in range(size) for number in range(by_rank[other])]
            mean = torch.cat(rows).sum(0, keepdim=True) / sum(by_rank)
            torch.testing.assert_close(model.module.layer.weight.grad, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Net, Sums])
@pytest.mark.parametrize("one_backward", [False, True], ids=["no_sync", "one backward"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("face", FACES)
def test_windows_of_other_lengths_with_gradient_weights(ranks, face, counts, one_backward, kind):
    options = {} if one_backward else {"accumulate_in_buckets": kind is Net}
    ranks(windows, face, counts, one_backward, options, kind, timeout=30)


@pytest.mark.parametrize("counts", [[(2, 1, 5), (1, 3, 1)], [(1, 1, 2), (5, 2, 1)]], ids=str)
@pytest.mark.parametrize("face", FACES)
def test_windows_of_other_lengths_on_three_ranks(ranks, face, counts):
    ranks(windows, face, counts, False, {}, Sums, size=3, timeout=30)


@pytest.mark.parametrize("counts", [[(2, 1), (0, 3), (1, 1)], [(0, 2), (1, 1), (3, 0)], [(2, 0), (2, 0)]], ids=str)
@pytest.mark.parametrize("face", FACES)
def test_a_rank_without_a_batch_in_a_window(ranks, face, counts):
    ranks(windows, face, counts, False, {}, Sums, timeout=30)


def train(model, rank, counts):
    """Windows of as many batches on each rank."""
    found = []
    for step, count in enumerate(counts):
        model.zero_grad()
        for number in range(count):
            with model.no_sync() if number < count - 1 else nullcontext():
                model(batch(rank, step, number)).square().sum().backward()
        found += [param.grad.clone() for param in model.module.parameters()]
    return found


@pytest.mark.parametrize("face", FACES)
def test_gradients_are_those_of_torch_where_a_forward_uses_what_the_one_before_has_written(rank, size, face):
    """torch sends nothing before the second forward of a window."""
    models = []
    for wrap in (TorchDDP, FACES[face]):
        torch.manual_seed(0)
        models.append(wrap(Net()))
    expected, got = (train(model, rank, (3, 1, 2, 1, 1, 4)) for model in models)
    for ours, other in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("face", FACES)
def test_forwards_that_do_not_count_change_no_moment(rank, size, face):
    """In windows of other lengths, evaluations on one rank, and a forward that raised and is run again."""
    torch.manual_seed(0)
    model = FACES[face](Net())
    for step, by_rank in enumerate([(1, 3), (3, 1), (2, 4), (4, 2)]):
        model.zero_grad()
        model.set_gradient_weight(by_rank[rank])
        for number in range(by_rank[rank]):
            if rank == step % 2:
                model.eval()
                model(batch(rank, step, 9))
                model.train()
                with torch.no_grad():
                    model(batch(rank, step, 9))
            with model.no_sync() if number < by_rank[rank] - 1 else nullcontext():
                x = batch(rank, step, number)
                if rank != step % 2:
                    with suppress(KeyError):
                        model(x, fails=True)
                model(x).sum().backward()
        assert torch.equal(state_of(model), of_rank_0(state_of(model)))


@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_that_has_joined_sends_at_the_moments_of_the_others(rank, size, last):
    torch.manual_seed(0)
    model = dpfuse.DistributedDataParallel(Net())
    with model.join():
        for step in range(3 + 3 * (rank == last)):
            for number in range(2 + step % 2):
                with model.no_sync() if number < 1 + step % 2 else nullcontext():
                    model(batch(rank, step, number)).sum().backward()
            model.zero_grad()
    assert torch.equal(state_of(model), of_rank_0(state_of(model)))
    train(model, rank, (1, 2))
