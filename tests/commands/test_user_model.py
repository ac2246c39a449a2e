"""Finding a user's model: what is accepted, and what each mistake is told."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from dpfuse.commands.user_model import build, find_factory
from dpfuse.errors import DPFuseError
from tests.commands import models
from tests.commands.models import PLACE


def test_a_factory_is_called_once_and_its_loss_runs_the_model():
    target = build(f"{PLACE}:build")
    assert isinstance(target.module, nn.Sequential)
    target.backward(target.module)
    assert all(param.grad is not None for param in target.module.parameters())
    target.step(target.module)
    assert all(param.grad is None for param in target.module.parameters())


def test_tensors_lie_on_the_device():
    assert {param.device.type for param in build(f"{PLACE}:build", "meta").module.parameters()} == {"meta"}
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("", "expected module:factory, such as mymodel:build"),
        ("models", "expected module:factory, such as mymodel:build"),
        ("models:", "expected module:factory, such as mymodel:build"),
        ("tests/commands/models.py:frozen", r"expected a module, .*: tests\.commands\.models:frozen"),
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("tests.no_such_module:build", r"there is no module 'tests\.no_such_module'"),
        (f"{PLACE}:biuld", "has no 'biuld'; did you mean 'build'"),
        (f"{PLACE}:xyz", "has no 'xyz'; expected a function"),
        (
            f"{PLACE}:not_callable",
            r"is of type int; expected a function without arguments that returns \(module, loss\)",
        ),
        (f"{PLACE}:number", r"returned int; expected \(module, loss\) with a torch\.nn\.Module"),
        (f"{PLACE}:numbers", r"returned \(int, int\); expected \(module, loss\)"),
        (f"{PLACE}:alone", r"returned no loss, only a Linear; expected \(module, loss\)"),
        (f"{PLACE}:no_function", "returned a loss of type int; expected a function that takes the model"),
        (f"{PLACE}:lazy", "parameter 'weight' has no shape yet; expected the model after a first forward"),
        (f"{PLACE}:wrapped", "returned a DataParallel; expected the module that it wraps"),
        (f"{PLACE}:frozen", "the Linear has no parameter with requires_grad=True"),
    ],
)
def test_what_is_wrong_is_said(place, text):
    with pytest.raises(DPFuseError, match=text):
        build(place)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda model: 3.0, "float"),
        (lambda model: model(torch.ones(3, 2)), r"a tensor of shape \(3, 2\)"),
        (lambda model: torch.ones(()), r"a tensor of shape \(\) without gradient"),
        (lambda model: (model(torch.ones(2)).sum(), 1), r"\(a tensor of shape \(\), int\)"),
    ],
)
def test_a_loss_that_is_no_scalar_is_said(monkeypatch, loss, got):
    monkeypatch.setattr(models, "alone", lambda: (nn.Linear(2, 2), loss))
    target = build(f"{PLACE}:alone")
    with pytest.raises(DPFuseError, match=f"the loss of {PLACE}:alone returned {got}; expected a scalar tensor"):
        target.step(target.module)


def test_what_the_factory_or_its_module_raises_comes_as_it_is(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="no data here"):
        build(f"{PLACE}:breaks")
    (tmp_path / "needs_something.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        find_factory("needs_something:build")


def test_the_current_folder_is_looked_into(tmp_path, monkeypatch):
    (tmp_path / "model_of_here.py").write_text("def build(): pass")
    monkeypatch.chdir(tmp_path)
    # As a console script has it.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert find_factory("model_of_here:build").__name__ == "build"
