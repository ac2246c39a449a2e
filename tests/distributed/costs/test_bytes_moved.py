"""What a step moves beyond the bare backward: bytes per byte of gradients, and calls, as torch's dispatcher sees them.

On a CPU small tensors are multiplied after they were copied, in cache, which the dispatcher counts as bytes; so small
ones are counted on one rank, where the factor of the mean is 1.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.engine.exchanges.in_place import LARGE
from tests.distributed.in_place import copied
from tests.operations import Operations

STEADY = 3  # steps until buckets are rebuilt and buffers exist


class Parameters(nn.Module):
    def __init__(self, numel, count):
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(count))
        self.register_buffer("slopes", torch.arange(1.0, numel + 1), persistent=False)

    def forward(self):
        return torch.stack([(param * self.slopes).sum() for param in self.params]).sum()


# Elements of a parameter, and how many of them.
TINY, MIDDLE, HUGE = (1000, 60), (40_000, 8), (LARGE // 4, 4)


def count(rank, size, numel, number, kind):
    with copied() if kind == "copied" else nullcontext():
        return counted(numel, number, kind == "views")


def counted(numel, number, views):
    """Bytes moved per byte of gradients beyond the bare backward, calls that move buckets, and collectives."""
    bare = Parameters(numel, number)
    nbytes = 4 * numel * number
    half = nbytes / 2 / 2**20
    model = dpfuse.DataParallel(
        Parameters(numel, number), None, half, half, gradient_as_bucket_view=views, plan="greedy"
    )
    seen = []
    for module in (bare, model):
        for _ in range(STEADY + 1):
            module.zero_grad()
            loss = module()
            with Operations() as done:
                loss.backward()
        seen.append(done)
    for param in model.parameters():
        assert torch.equal(param.grad, bare.slopes)
    theirs, ours = seen
    calls = ours.calls_of(nbytes / 20) - theirs.calls_of(nbytes / 20)
    in_place = sum(bucket.parts.exchange.bytes_in_place for bucket in model.reducer.buckets)
    return {
        "moved": (sum(ours.moved) - sum(theirs.moved)) / nbytes,
        "calls": dict(calls),
        "buckets": len(model.bucket_plan.buckets),
        "collectives": ours.names.count("allreduce_"),
        "in place": in_place / nbytes,
    }


@pytest.mark.parametrize(
    ("size", "sizes", "kind", "moved", "calls"),
    [
        (1, TINY, "views", 2, {"cat": 2}),
        (1, TINY, "private", 2, {"cat": 2}),
        (1, TINY, "copied", 4, {"cat": 2, "_foreach_copy_": 2}),
        (2, MIDDLE, "views", 2, {"mul": 8}),
        (2, MIDDLE, "private", 2, {"mul": 8}),
        (2, MIDDLE, "copied", 4, {"mul": 8, "_foreach_copy_": 2}),
        (2, HUGE, "views", 2, {"mul": 4}),
        (2, HUGE, "private", 2, {"_foreach_mul_": 2}),  # gloo cannot multiply
        (1, HUGE, "private", 0, {}),
    ],
)
def test_a_step_moves_as_many_bytes_as_it_must(ranks, size, sizes, kind, moved, calls):
    for facts in ranks(count, *sizes, kind, size=size):
        in_place = sizes == HUGE and kind == "private"
        assert facts["in place"] == in_place
        assert facts["moved"] == pytest.approx(moved, rel=0.01, abs=0.01)
        assert facts["calls"] == calls
        assert facts["buckets"] == 2
        # A gradient in place is a collective of its own; the report travels with the last bucket.
        assert facts["collectives"] == (sizes[1] + 1 if in_place else facts["buckets"])


def test_what_is_read_and_what_is_written_is_counted():
    one, other = torch.zeros(10), torch.zeros(10)
    with Operations() as done:
        torch.mul(one, 2.0, out=other)
        one.copy_(other)
        one.mul_(2.0)
        torch.cat([one, other])
        one.view(2, 5).t().as_strided((3,), (1,))
        torch._foreach_copy_([one], [other])
    assert +done.bytes_of() == {"mul": 80, "copy_": 80, "mul_": 80, "cat": 160, "_foreach_copy_": 80}
