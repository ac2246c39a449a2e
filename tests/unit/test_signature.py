"""The signature of a module: nothing is taken for what it equals, and nothing is noticed where nothing has changed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from dpfuse.model.signature import ModelSignature


class Agreeable(nn.Parameter):
    """Equal to whatever it is compared with."""

    def __eq__(self, other):
        return True

    __hash__ = nn.Parameter.__hash__


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = nn.Parameter(torch.ones(3))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.ones(0))
        self.agreeable = Agreeable(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("free", None)
        self.layer = nn.Linear(2, 2)
        self.loss = nn.MSELoss()


def replaced(name, value):
    def change(model):
        model._parameters[name] = value

    return pytest.param(change, id=f"{name} {type(value).__name__} {'' if value is None else list(value.shape)}")


def convert(model):
    model.layer.double()


def unfreeze(model):
    model.frozen.requires_grad_(True)


def remove(model):
    del model.many


def add(model):
    model.more = nn.Parameter(torch.ones(3))


def fill(model):
    model.loss.register_parameter("scale", nn.Parameter(torch.ones(1)))


def add_module(model):
    model.loss.inner = nn.ReLU()


def swap_module(model):
    model.loss = nn.MSELoss()


def rename(model):
    model._parameters["other"] = model._parameters.pop("many")


@pytest.mark.parametrize(
    "change",
    [
        *(replaced(name, nn.Parameter(torch.ones(3))) for name in ("many", "one", "none", "agreeable", "free")),
        *(replaced(name, nn.Parameter(torch.ones(1))) for name in ("many", "one", "none", "agreeable", "free")),
        *(replaced(name, nn.Parameter(torch.ones(0))) for name in ("one", "none", "agreeable", "free")),
        *(replaced(name, None) for name in ("many", "one", "none", "agreeable")),
        replaced("many", nn.Parameter(torch.ones(0, 3))),
        replaced("many", nn.Parameter(torch.ones(()))),
        replaced("one", nn.Parameter(torch.ones(()))),
        replaced("many", nn.Parameter(torch.ones(3, device="meta"))),
        replaced("agreeable", Agreeable(torch.ones(3))),
        *(convert, unfreeze, remove, add, fill, add_module, swap_module, rename),
    ],
)
def test_a_change_is_noticed(change):
    model = Model()
    signature = ModelSignature(model)
    assert signature.unchanged()
    change(model)
    assert not signature.unchanged()
    signature.change()
    assert signature.unchanged(), "what was looked at is no news"


def test_training_is_no_change():
    model = Model()
    signature = ModelSignature(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.eval()
    model.zero_grad()
    assert signature.unchanged()


def test_a_module_that_was_removed_is_not_kept_alive():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    signature = ModelSignature(model)
    removed = weakref.ref(model[1])
    model[1] = nn.BatchNorm1d(2, affine=False)
    assert not signature.unchanged()
    assert signature.change() is None
    gc.collect()
    assert removed() is None
