"""What a rank runs in place of a forward that raised is averaged: the batch, a part of it, its halves, or another."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

WAYS = {
    "dp": lambda net: dpfuse.DataParallel(net),
    "dp with buffers": lambda net: dpfuse.DataParallel(net, broadcast_buffers=True),
    "ddp": lambda net: dpfuse.DistributedDataParallel(net),
    "unused": lambda net: dpfuse.DistributedDataParallel(net, find_unused_parameters=True, static_graph=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def forward(self, x, mask=None, fails=False):
        if fails:
            raise RuntimeError("out of memory, as planted")
        outputs = self.layers(x["x"] if isinstance(x, dict) else x)
        return outputs if mask is None else outputs * mask


def wrapped(way="dp"):
    torch.manual_seed(0)
    return WAYS[way](Net())


def batch(rank, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def fail(model, x, **arguments):
    with suppress(RuntimeError):
        model(x, fails=True, **arguments)


def train(model, x):
    """Run one backward; return the number of rows whose gradients it adds."""
    outputs = model(x)
    outputs.sum().backward()
    return len(outputs)


def the_same(model, x):
    fail(model, x)
    return train(model, x)


def a_part(model, x):
    fail(model, x)
    return train(model, x[:2])


def ever_smaller_parts(model, x):
    fail(model, x)
    fail(model, x[:3])
    fail(model, x)
    return train(model, x[1:3])


def in_a_dict(model, x):
    fail(model, {"x": x})
    return train(model, {"x": x[2:]})


def after_an_evaluation(model, x):
    fail(model, x)
    model.eval()
    model(torch.ones(4, 3))
    model.train()
    return train(model, x)


def another_batch(model, x):
    fail(model, x)
    return train(model, torch.cat([x, x])[:5] + 1)


def a_dummy_batch_times_zero(model, x):
    fail(model, x)
    (0 * model(torch.zeros(2, 3)).sum()).backward()
    return 0


def halves_in_a_window_of_their_own(model, x):
    fail(model, x)
    with model.no_sync():
        rows = train(model, x[:2].clone())
    return rows + train(model, x[2:].clone())


def halves_of_one_loss(model, x):
    fail(model, x)
    (model(x[:2]).sum() + model(x[2:]).sum()).backward()
    return len(x)


ATTEMPTS = [
    the_same, a_part, ever_smaller_parts, in_a_dict, after_an_evaluation, another_batch, a_dummy_batch_times_zero,
    halves_in_a_window_of_their_own,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_in_its_place_is_averaged(rank, size, way):
    # Where each forward sends buffers first, a rank must run as many outside of no_sync() as the others.
    for attempt in [*ATTEMPTS, *([halves_of_one_loss] if way == "dp" else [])]:
        model = wrapped(way)
        for step in range(4):  # two of the failing rank 0, two of rank 1; windows of one, two, … backwards
            model.zero_grad()
            local = torch.zeros(2)
            for micro in range(step % 2 + 1):
                x = batch(rank, step + micro)
                with model.no_sync() if micro < step % 2 else nullcontext():
                    local += (attempt if rank == step // 2 else train)(model, x)
            dist.all_reduce(local)
            torch.testing.assert_close(model.module.layers[2].bias.grad, local / size, msg=attempt.__name__)
