"""A forward that raised and is run again with its batch, or a part of it, is no batch that a rank has dropped."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse import DPFuseError
from tests.distributed.failures.test_different_counts import FORWARDS

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


def the_same(model, x):
    fail(model, x)
    return model(x)


def a_part(model, x):
    fail(model, x)
    return model(x[:2])


def ever_smaller_parts(model, x):
    fail(model, x)
    fail(model, x[:3])
    fail(model, x)
    return model(x[1:3])


def in_a_dict(model, x):
    fail(model, {"x": x})
    return model({"x": x[2:]})


def after_an_evaluation(model, x):
    fail(model, x)
    model.eval()
    model(torch.ones(4, 3))
    model.train()
    return model(x)


ATTEMPTS = [the_same, a_part, ever_smaller_parts, in_a_dict, after_an_evaluation]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_attempt_is_averaged(rank, size, way):
    for attempt in ATTEMPTS:
        model = wrapped(way)
        for step in range(4):  # two of the failing rank 0, two of rank 1; windows of one, two, … backwards
            model.zero_grad()
            local = torch.zeros(2)
            for micro in range(step % 2 + 1):
                x = batch(rank, step + micro)
                with model.no_sync() if micro < step % 2 else nullcontext():
                    outputs = attempt(model, x) if rank == step // 2 else model(x)
                    outputs.sum().backward()
                local += len(outputs)
            dist.all_reduce(local)
            torch.testing.assert_close(model.module.layers[2].bias.grad, local / size, msg=attempt.__name__)


def the_next_rows_of_one_tensor(model, rank):
    data = torch.cat([batch(rank, 0), batch(rank, 1)])
    fail(model, data[:4])
    return model(data[4:])


def the_next_batch_in_the_same_memory(model, rank):
    x = batch(rank, 0)
    fail(model, x)
    x.copy_(batch(rank, 1))
    return model(x)


def the_next_batch_with_the_same_mask(model, rank):
    mask = torch.ones(2)
    fail(model, batch(rank, 0), mask=mask)
    return model(batch(rank, 1), mask=mask)


def a_second_attempt_that_raised_too(model, rank):
    x = batch(rank, 0)
    fail(model, x)
    fail(model, x[:2])
    return model(batch(rank, 1))


def two_batches(model, rank):
    fail(model, batch(rank, 0))
    x = batch(rank, 1)
    fail(model, x)
    return model(x)


DROPPED = [
    the_next_rows_of_one_tensor,
    the_next_batch_in_the_same_memory,
    the_next_batch_with_the_same_mask,
    a_second_attempt_that_raised_too,
    two_batches,
]


@pytest.mark.parametrize("way", ["dp", "dp with buffers", "ddp"])
def test_the_next_batch_is_none(rank, size, way):
    for drop in DROPPED:
        model = wrapped(way)
        model(batch(rank, 7)).sum().backward()
        outputs = drop(model, rank) if rank == 1 else model(batch(rank, 1))
        with pytest.raises(DPFuseError, match=rf"^rank {rank}: {FORWARDS}"):
            outputs.sum().backward()
        model.zero_grad()
        model(batch(rank, 8)).sum().backward()
        torch.testing.assert_close(model.module.layers[2].bias.grad, torch.full([2], 4.0), msg=drop.__name__)
