"""torch.compile around the wrapper: communication overlaps with the compiled backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse import DistributedDataParallel

BOTH = (TorchDDP, DistributedDataParallel)


class Chain(nn.Module):
    """A name of its own for each layer, where a compiled chain is cut."""

    def __init__(self, count, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def spans(profile, name):
    """Begin and end of the ranges whose name begins like that, in the order of time."""
    found = [event.time_range for event in profile.events() if event.name.startswith(name)]
    return sorted((span.start, span.end) for span in found)


def trace_backward(rank, size, split):
    torch._dynamo.reset()
    net = Chain(12, 512)  # layers of 1 MB
    models = [cls(copy.deepcopy(net), bucket_cap_mb=3) for cls in BOTH]
    with torch._dynamo.config.patch(optimize_ddp=split):
        for model in models:
            compiled = torch.compile(model, backend="aot_eager")
            for step in range(3):
                model.zero_grad()
                loss = compiled(torch.randn(4, 512, generator=torch.Generator().manual_seed(rank + 2 * step))).sum()
                if model is models[1] and step == 2:
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                        loss.backward()
                else:
                    loss.backward()
    for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    graphs, sent = spans(profile, "CompiledFunctionBackward"), spans(profile, "dpfuse::all_reduce")
    assert len(sent) == len(models[1].bucket_plan.buckets) > 2
    return len(graphs), [sum(begin < end for begin, _ in sent) for _, end in graphs]


def test_buckets_are_sent_while_later_parts_of_the_compiled_backward_run(ranks):
    for count, sent_by_then in ranks(trace_backward, True):
        assert count > 2
        # Something is on its way before the last part ends, and more of it with every other part.
        assert sent_by_then[-1] >= count - 2
        assert sent_by_then == sorted(sent_by_then)


@pytest.mark.slow
def test_without_splits_nothing_is_sent_before_the_compiled_backward_ends(ranks):
    assert ranks(trace_backward, False) == [(1, [0])] * 2


@pytest.mark.parametrize(
    "mode",
    [
        "python_reducer",
        pytest.param("python_reducer_without_compiled_forward", marks=pytest.mark.slow),
        pytest.param("no_optimization", marks=pytest.mark.slow),
    ],
)
def test_other_modes_of_the_compiler_give_the_mean_too(rank, size, mode):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = TorchDDP(copy.deepcopy(net))
    with torch._dynamo.config.patch(optimize_ddp=mode):
        model = DistributedDataParallel(copy.deepcopy(net))
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(3):
            x = torch.full((2, 4), rank + step + 1.0)
            for each in (expected, compiled):
                each.zero_grad()
                each(x).sum().backward()
            for theirs, ours in zip(expected.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)


class StochasticDepth(nn.Module):
    """Leaves out rows at random: the number decides, so a second block makes the compiler treat it as a variable."""

    def __init__(self, width, share):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.share = share

    def dropped(self, x):
        if self.share == 0.0:
            return x
        noise = torch.empty([x.shape[0], 1]).bernoulli_(1.0 - self.share)
        return x * noise.div_(1.0 - self.share)

    def forward(self, x):
        x = x + self.dropped(self.first(x))
        return x + self.dropped(self.second(x))


class Depths(nn.Module):
    """Blocks with different numbers, each compiled by itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StochasticDepth(512, share) for share in (0.0, 0.1, 0.2))  # layers of 1 MB

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.slow
@pytest.mark.ranks(timeout=200)
def test_a_program_that_torch_cannot_split_trains_without_splits(rank, size):
    """That of pytorch/pytorch#196227. It needs no option: a `DataParallel` is never split, and torch has a switch."""
    net = Depths()
    plain = TorchDDP(copy.deepcopy(net))
    ways = [
        (dpfuse.DataParallel(copy.deepcopy(net)), True),
        (DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1), False),
    ]
    for model, split in ways:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=split):
            compiled = torch.compile(model, backend="aot_eager")
            for step in range(2):
                for each in (plain, compiled):
                    torch.manual_seed(10 * step + rank)
                    each.zero_grad()
                    each(torch.randn(4, 512)).sum().backward()
                for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad)
