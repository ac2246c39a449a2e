"""What a rank had before the average is looked at in a gradient that is averaged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse.loop.mean_equals_own import OwnAndMean


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_parameter_keeps_its_gradient_and_tells_nothing(frozen):
    """An unchanged gradient would look as if all ranks had had the same one."""
    layer = nn.Linear(8, 8)
    layer(torch.randn(3, 8)).square().sum().backward()
    layer.weight.requires_grad_(not frozen)
    own = OwnAndMean()
    own.look_at(layer.weight)
    assert own.was_equal() is not frozen
    own.packed({"weight": layer.weight})
    assert (own._param is None) is frozen
