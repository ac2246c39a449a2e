"""What a rank had before the average is looked at in a gradient that is averaged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpfuse.loop.mean_equals_own import OwnAndMean


def buffer_of(low, high):
    """A buffer of two ranks' gradients, at these addresses."""
    return SimpleNamespace(table=SimpleNamespace(storage_range=(low, high)), averaging=SimpleNamespace(pre_scale=0.5))


NOWHERE = buffer_of(0, 0)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_parameter_keeps_its_gradient_and_tells_nothing(frozen):
    """An unchanged gradient would look as if all ranks had had the same one."""
    layer = nn.Linear(8, 8)
    layer(torch.randn(3, 8)).square().sum().backward()
    layer.weight.requires_grad_(not frozen)
    own = OwnAndMean()
    own.look_at(layer.weight, NOWHERE)
    assert own.was_equal() is not frozen
    own.packed({"weight": layer.weight})
    assert (own._param is None) is frozen


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("own", "mean", "equal"),
    [
        ([1.0, -2.0], [1.0, -2.0], True),
        ([1.0, -2.0], [1.0, -2.1], False),
        ([1.0, -2.0], [0.5, -1.0], False),
        ([1.0, -2.0], [-1.0, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([float("inf")], [float("inf")], False),
        ([], [], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_what_this_rank_has_up_to_rounding(own, mean, equal, dtype, packed):
    param, look = nn.Parameter(torch.tensor(own, dtype=dtype)), OwnAndMean()
    param.grad = torch.tensor(own, dtype=dtype) * (0.5 if packed else 1)
    address = param.grad.data_ptr()
    look.look_at(param, buffer_of(address, address + 1) if packed else NOWHERE)
    param.grad = torch.tensor(mean, dtype=dtype)
    assert look.was_equal() is equal
    assert look.was_equal() is False  # once
