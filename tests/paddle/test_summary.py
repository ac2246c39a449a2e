"""summary: the table, the counts, and that the network is as it was before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse.paddle as paddle
from dpfuse.paddle import Model
from dpfuse.paddle.static import InputSpec
from tests.paddle.models import make_net


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2, 2), nn.Flatten(), nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10),
    )  # fmt: skip


@pytest.mark.parametrize(
    "size", [(1, 1, 28, 28), (None, 1, 28, 28), [-1, 1, 28, 28], InputSpec([None, 1, 28, 28]), [(1, 1, 28, 28)]]
)
def test_lenet_has_the_numbers_of_paddles_documentation(size, capsys):
    assert paddle.summary(lenet(), size) == {"total_params": 61610, "trainable_params": 61610}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Conv2d-1", "[1,", "1,", "28,", "28]", "[1,", "6,", "28,", "28]", "60"] in lines
    assert ["Linear-8", "[1,", "400]", "[1,", "120]", "48,120"] in lines
    assert ["Params", "size", "(MB):", "0.24"] in lines


def test_shared_and_frozen_parameters_count_once_and_apart(capsys):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids):
            return self.out(self.table(ids) * self.scale)

    net = Tied()
    net.scale.requires_grad_(False)
    assert paddle.summary(net, (2, 3), "int64") == {"total_params": 32, "trainable_params": 28}
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows if row[0].rpartition("-")[2].isdigit()] == [
        ("Embedding-1", "28"), ("Linear-2", "0"), ("Tied-3", "4"),
    ]  # fmt: skip
    assert ["Non-trainable", "params:", "4"] in rows


def test_several_inputs_and_an_input_itself():
    class Two(nn.Module):
        def forward(self, a, b):
            assert (a.dtype, b.dtype) == (torch.float32, torch.int64)
            return a + b

    nothing = {"total_params": 0, "trainable_params": 0}
    assert paddle.summary(Two(), [(1, 4), (1, 4)], ["float32", "int64"]) == nothing

    class Listed(nn.Module):
        def forward(self, both):
            return {"sum": both[0] + both[1]}

    assert paddle.summary(Listed(), input=[torch.ones(2), torch.ones(2)]) == nothing


def test_the_network_is_as_before():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    net[1].eval()
    paddle.summary(net, (4, 3))
    assert [net.training, net[0].training, net[1].training] == [True, True, False]
    assert net[0].running_mean.tolist() == [0, 0, 0]
    assert not net[0]._forward_hooks
    with pytest.raises(RuntimeError):
        paddle.summary(net, (4, 5))
    assert net[0].training
    assert not net[0]._forward_hooks


def test_a_model_uses_its_specs():
    assert Model(make_net(), InputSpec([None, 5], "float32", "x")).summary()["total_params"] == 75
    assert Model(make_net()).summary((1, 5))["total_params"] == 75
    for model in (Model(make_net()), Model(make_net(), ["x"])):
        with pytest.raises(ValueError, match="summary needs input_size"):
            model.summary()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"net": 3, "input_size": (1,)}, TypeError, "net must be"),
        ({}, ValueError, "either input_size"),
        ({"input_size": (1, 5), "input": torch.ones(1, 5)}, ValueError, "either input_size"),
        ({"input_size": (1, 2.5)}, ValueError, r"input_size\[1\]"),
        ({"input_size": "15"}, TypeError, "input_size must be"),
        ({"input_size": (1, 5), "dtypes": "float31"}, ValueError, "float31"),
        ({"input_size": [(1, 5)], "dtypes": ["float32", "int64"]}, ValueError, "2 entries for 1 inputs"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        paddle.summary(**{"net": make_net(), **arguments})
