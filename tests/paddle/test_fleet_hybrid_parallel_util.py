"""Averaging gradients by hand, under the path and the signatures of Paddle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients,
    fused_allreduce_gradients_with_group,
)


class Topology:
    """What a program of Paddle's asks fleet for: who averages with whom."""

    def __init__(self, group):
        self.group = group

    def get_data_parallel_group(self):
        return self.group


def reduced(rank, size):
    own = [dist.new_group([member]) for member in range(size)][rank]
    results = []
    for average in (
        lambda params: fused_allreduce_gradients(params, None),
        lambda params: fused_allreduce_gradients(iter(params), Topology(dist.group.WORLD)),
        lambda params: fused_allreduce_gradients(params, Topology(own)),
        lambda params: fused_allreduce_gradients_with_group(params, None),
        lambda params: fused_allreduce_gradients_with_group(params, dist.group.WORLD, 0, 1.0),
        lambda params: fused_allreduce_gradients_with_group(params, own, scale=1.0),
    ):
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.full((2,), rank + 1.0)
        average([param])
        results.append(param.grad[0].item())
    return results


def test_gradients_are_averaged_over_the_group_that_is_given(ranks):
    assert ranks(reduced) == [[1.5, 1.5, 1.0, 1.5, 3.0, 1.0], [1.5, 1.5, 2.0, 1.5, 3.0, 2.0]]


def test_averaging_by_hand_is_nothing_on_one_process_and_needs_both_arguments():
    util = fleet.utils.hybrid_parallel_util
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    util.fused_allreduce_gradients([param], None)
    assert param.grad.tolist() == [1, 1]
    with pytest.raises(TypeError, match="hcg"):
        util.fused_allreduce_gradients([param])
    with pytest.raises(TypeError, match=r"hcg must be None or have a method get_data_parallel_group\(\), got int"):
        util.fused_allreduce_gradients([param], 3)
    with pytest.raises(TypeError, match="parameter_list"):
        util.fused_allreduce_gradients(3, None)
