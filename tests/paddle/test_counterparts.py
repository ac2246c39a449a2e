"""Names of Paddle that are not here: one line says so, and names what PyTorch has."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import dpfuse.paddle as paddle
from dpfuse.paddle.counterparts import COUNTERPARTS, text_of
from tests.patience import patience

HERE = "it holds Paddle's data-parallel systems for PyTorch"


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        (lambda: paddle.nn, "dpfuse.paddle has no 'nn': .*; use torch.nn$"),
        (lambda: paddle.optimizer, "'optimizer': .*; use torch.optim$"),
        (lambda: paddle.set_device, "'set_device': .*; use model.to"),
        (lambda: paddle.to_tensor, "; use torch.as_tensor$"),
        (lambda: paddle.enable_static, "; use nothing: paddle.static's programs work beside eager modules$"),
        (lambda: paddle.zeros, "'zeros': .*; use torch.zeros$"),
        (lambda: paddle.distributed.all_reduce, "'distributed.all_reduce': .*; use torch.distributed.all_reduce$"),
        (lambda: paddle.distributed.alltoall, "; use torch.distributed.all_to_all$"),
        (lambda: paddle.static.nn, "'static.nn': .*; use torch.nn's modules, called under paddle.static"),
        (lambda: paddle.io.BatchSampler, "'io.BatchSampler': .*; use torch.utils.data.BatchSampler$"),
        (lambda: paddle.no_such_thing, f"dpfuse.paddle has no 'no_such_thing': {HERE}$"),
        (lambda: paddle.metric.NoSuchThing, f"'metric.NoSuchThing': {HERE}$"),
        (lambda: paddle.callbacks.NoSuchThing, f"'callbacks.NoSuchThing': {HERE}$"),
    ],
)
def test_an_attribute_that_is_not_here_names_its_counterpart(reads, says):
    with pytest.raises(AttributeError, match=says) as raised:
        reads()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("nn", "nn"), ("nn.functional", "nn"), ("vision.transforms", "vision"), ("static.nn", "static.nn"),
     ("fluid", "fluid"), ("distributed.checkpoint", "distributed.checkpoint"), ("incubate.nn", "incubate"),
     ("distributed.fleet.meta_parallel", "distributed.fleet.meta_parallel")],
)  # fmt: skip
def test_an_import_of_what_is_not_here_names_its_counterpart(name, missing):
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"dpfuse.paddle.{name}")
    assert str(raised.value) == text_of(missing)
    assert str(raised.value).endswith(f"; use {COUNTERPARTS.get(missing, 'torch.nn')}")


def test_a_from_import_names_it_too():
    with pytest.raises(ModuleNotFoundError, match=r"use torch\.nn$"):
        from dpfuse.paddle import nn  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"use torch\.zeros$"):
        from dpfuse.paddle import zeros  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"use torch\.distributed\.all_reduce$"):
        from dpfuse.paddle.distributed import all_reduce  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"use torch\.fft$"):
        importlib.import_module("dpfuse.paddle.fft")
    with pytest.raises(ImportError, match="cannot import name 'no_such_thing'"):
        from dpfuse.paddle import no_such_thing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named .dpfuse\.paddle\.no_such_module"):
        importlib.import_module("dpfuse.paddle.no_such_module")


def test_names_that_are_here_have_no_counterpart():
    for path in COUNTERPARTS:
        place = paddle
        *parents, name = path.split(".")
        for parent in parents:
            place = getattr(place, parent, None)
        assert name not in vars(place or object), path


def test_counterparts_of_torch_exist():
    for path, text in COUNTERPARTS.items():
        for name in re.findall(r"\btorch(?:\.[A-Za-z_]\w*)+", text):
            module, *rest = name.split(".")
            found = importlib.import_module(module)
            for part in rest:
                found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
            assert found is not None, (path, name)


@pytest.mark.slow
def test_tools_that_ask_a_module_get_their_usual_answers():
    assert not hasattr(paddle, "__wrapped__")
    assert getattr(paddle, "anything", 3) == 3
    script = "import dpfuse.paddle, sys; print(len([f for f in sys.meta_path if type(f).__name__ == '_Imports']))"
    twice = f"{script}; import importlib; importlib.reload(dpfuse.paddle); {script}"
    done = subprocess.run(
        [sys.executable, "-c", twice], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert done.stdout.split() == ["1", "1"]
