"""A drift is named however gradients travel and weights are updated."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Muon

import dpfuse
from dpfuse import ShardedOptimizer, WeightsWarning
from tests.one_in import one_in

START, BOUND = 7, 64


class Net(nn.Module):
    """A frozen layer, two that share a weight, and one more."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.layers = nn.Sequential(*[nn.Linear(6, 6, bias=False, dtype=dtype) for _ in range(3)])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers(self.frozen(x.to(self.frozen.weight.dtype)))


def plain(model):
    return SGD([param for param in model.module.parameters() if param.requires_grad], lr=0.01, momentum=0.9)


def trained(model):
    return [param for param in model.module.parameters() if param.requires_grad]


SETTINGS = {
    "views": ({}, plain),
    "private gradients": ({"gradient_as_bucket_view": False}, plain),
    "one bucket for each gradient": ({"comm_buffer_size": 0, "last_comm_buffer_size": 0}, plain),
    "a narrow wire": ({"wire_dtype": torch.bfloat16, "error_feedback": True}, plain),
    "eight bits": ({"wire_dtype": torch.float8_e4m3fn}, plain),
    "deterministic": ({"deterministic": True}, plain),
    "in the buckets": ({"accumulate_in_buckets": True}, plain),
    "metrics": ({"metrics": 3}, plain),
    "check_finite": ({"check_finite": "raise"}, plain),
    "unused": ({"find_unused_parameters": True}, plain),
    "Adam": ({}, lambda model: Adam(trained(model), lr=0.01)),
    "sharded": ({}, lambda model: ShardedOptimizer(model, Adam, trained(model), lr=0.01)),
    "sharded, owners": ({}, lambda model: ShardedOptimizer(model, Muon, trained(model), lr=0.01)),
    "sharded, in backward": (
        {},
        lambda model: ShardedOptimizer(model, SGD, trained(model), lr=0.01, step_in_backward=True),
    ),
}


def named(rank, size, edit, model, optimizer, steps=START + BOUND + 1, run=None, accumulate=1):
    """Train, let `edit` change something on the last rank, and return what each rank is told."""
    told = []
    for step in range(steps):
        inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for part in range(accumulate):
                with model.no_sync(enabled=part < accumulate - 1):
                    (model if run is None else run)(inputs).float().square().mean().backward()
        told += [str(each.message) for each in caught if isinstance(each.message, WeightsWarning)]
        optimizer.step()
        optimizer.zero_grad()
        if step == START and rank == size - 1:
            with torch.no_grad():
                edit(model.module)
    return told


def edit_frozen(net):
    net.frozen.weight[2, 3] += 0.25


def edit_shared(net):
    net.layers[1].weight[2, 3] += 0.25


@pytest.mark.parametrize("name", one_in(4, SETTINGS))
def test_a_frozen_weight(rank, size, name):
    options, make = SETTINGS[name]
    model = dpfuse.DataParallel(Net(), check_training="warn", **options)
    (text,) = named(rank, size, edit_frozen, model, make(model), accumulate=2 if name == "in the buckets" else 1)
    assert "It is parameter 'frozen.weight'; 1 of 4 differ." in text


@pytest.mark.parametrize("name", one_in(4, [name for name in SETTINGS if not name.startswith("sharded")]))
def test_a_shared_weight_that_is_trained(rank, size, name):
    options, make = SETTINGS[name]
    model = dpfuse.DataParallel(Net(), check_training="warn", **options)
    (text,) = named(rank, size, edit_shared, model, make(model), accumulate=2 if name == "in the buckets" else 1)
    assert "It is parameter 'layers.0.weight'; 1 of 4 differ." in text


def test_of_16_bits(rank, size):
    model = dpfuse.DataParallel(Net(torch.bfloat16), check_training="warn")
    (text,) = named(rank, size, edit_shared, model, plain(model))
    assert "'layers.0.weight'" in text


def test_of_a_compiled_model(rank, size):
    model = dpfuse.DataParallel(Net(), check_training="warn")
    (text,) = named(rank, size, edit_shared, model, plain(model), run=torch.compile(model, backend="eager"))
    torch._dynamo.reset()
    assert "'layers.0.weight'" in text


def test_inside_windows_of_several_batches(rank, size):
    model = dpfuse.DistributedDataParallel(Net())
    (text,) = named(rank, size, edit_shared, model, plain(model), accumulate=4)
    assert "'layers.0.weight'" in text


def test_of_one_of_several_models(rank, size):
    models = [dpfuse.DataParallel(Net(), check_training="warn") for _ in range(3)]
    optimizers = [plain(model) for model in models]
    told = []
    for step in range(START + BOUND + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for model in models:
                model(torch.ones(2, 6) * (rank + 1)).square().mean().backward()
        told += [str(each.message) for each in caught if isinstance(each.message, WeightsWarning)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == START and rank == 0:
            with torch.no_grad():
                edit_shared(models[1].module)
    assert len(told) == 1
    assert [bool(model._sync.differing_weights) for model in models] == [False, True, False]


def test_a_joined_rank_takes_no_part_and_the_others_are_compared(rank, size):
    model = dpfuse.DistributedDataParallel(Net())
    with model.join():
        told = named(rank, size, edit_frozen, model, plain(model), steps=(START + BOUND + 1) * (1 + (rank > 0)))
    # Rank 0 has run out of inputs when the last rank's weights change nothing more; both heard of it before.
    assert len(told) == 1
