"""Inputs of a model with `device_ids`: what is on its device stays as it is, and the rest is moved there.

A CPU stands in for the GPU on which the module is, and the meta device for one on which the inputs are not.
"""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import dpfuse

Pair = namedtuple("Pair", "x y")


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, *inputs, **kwargs):
        self.seen = inputs, kwargs
        return self.layer.bias


def on_gpu(module, device="cpu"):
    """As on a GPU whose tensors have that device."""
    model = dpfuse.DistributedDataParallel(module)
    assert model.device_ids is None
    model.device_ids, model.device = [0], torch.device(device)
    return model


THERE = {
    "0 dimensions": torch.tensor(2.0),
    "1 element": torch.ones(1),
    "requires a gradient": torch.ones(2, 3, requires_grad=True),
    "is a result": torch.ones(2, 3, requires_grad=True) * 2,
    "sparse": torch.eye(3).to_sparse(),
    "integers": torch.arange(4),
    "packed": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
    "no tensor": "text",
    "none": None,
}


@pytest.mark.parametrize("what", THERE)
def test_what_is_on_the_device_stays_the_same_object(group, what):
    value = THERE[what]
    model = on_gpu(Echo())
    model(value, value, by_name=value)
    seen, named = model.module.seen
    assert seen[0] is seen[1] is named["by_name"] is value
    model([value], {"key": (value, 3)}, pair=Pair(value, 4))
    (listed, keyed), named = model.module.seen
    assert type(listed) is list
    assert listed[0] is keyed["key"][0] is named["pair"].x is value
    assert (keyed["key"][1], type(named["pair"])) == (3, Pair)


def test_a_forward_without_arguments_has_none(group):
    model = on_gpu(Echo())
    model()
    assert model.module.seen == ((), {})
    model(by_name=1)
    assert model.module.seen == ((), {"by_name": 1})


def test_what_is_elsewhere_is_moved(group):
    model = on_gpu(Echo(), "meta")
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    model(torch.tensor(2.0), [torch.ones(3, 2)], {"key": packed}, pair=Pair(torch.ones(2), "text"))
    (scalar, listed, keyed), named = model.module.seen
    moved = keyed["key"]
    assert type(moved) is PackedSequence
    found = [scalar, listed[0], moved.data, named["pair"].x]
    assert [each.device.type for each in found] == ["meta"] * 4
    assert [tuple(each.shape) for each in found] == [(), (3, 2), (4, 2), (2,)]
    assert named["pair"].y == "text"


def test_the_output_of_another_model_may_be_changed_in_place(group):
    """As images of a generator, of which a discriminator begins with an activation that works in place."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1))
    z = torch.randn(5, 3)
    (expected,) = torch.autograd.grad(judge(generator(z)).sum(), [generator.weight])
    model = on_gpu(judge)
    model(generator(z)).sum().backward()
    assert torch.equal(generator.weight.grad, expected)
