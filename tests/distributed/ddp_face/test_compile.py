"""torch.compile around the wrapper: communication overlaps with the compiled backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

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
