"""Modules, batches, optimizers and executors that several tests of programs use."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dpfuse.paddle import static

__all__ = [
    "Regression",
    "assert_like",
    "batch",
    "chunks",
    "custom",
    "executor",
    "momentum",
    "program_of",
    "reference",
    "sgd",
    "sharing",
    "training_program",
]


class Regression(nn.Module):
    """Two layers and their mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 2)

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        y = self.outer(torch.tanh(self.inner(x)))
        return {"y": y, "loss": ((y - t) ** 2).mean()}


def custom(forward: Callable[..., object]) -> nn.Module:
    """A module of this forward."""
    return type("Custom", (nn.Module,), {"forward": forward})()


def batch(seed: int, rows: int = 6) -> dict[str, Tensor]:
    """A batch for it."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, generator=generator), "t": torch.randn(rows, 2, generator=generator)}


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def program_of(module, **shapes):
    """The program of a module's forward. Its variables have the module's names, and those of the returned dict."""
    shapes = {"x": [None, 3], "t": [None, 2]} | shapes
    dtype = next((param.dtype for param in module.parameters()), torch.float32)
    gc.collect()  # an earlier test's program of these names leaves the global scope
    program = static.Program()
    program.root = module
    with static.program_guard(program):
        feeds = [static.data(name, shapes[name], dtype) for name in inspect.signature(module.forward).parameters]
        outputs = module.forward(*feeds)
        for name, value in outputs.items() if isinstance(outputs, dict) else ():
            value.name = name
    return program


def training_program(module, optimizer=sgd):
    program = program_of(module)
    program.minimize("loss", optimizer)
    return program


def executor(program, **options):
    return static.ParallelExecutor(False, loss_name="loss", main_program=program, **options)


def chunks(step, count):
    """What `count` devices are fed."""
    rows = -(-len(step["x"]) // count)
    return [
        {name: value[start : start + rows] for name, value in step.items()} for start in range(0, len(step["x"]), rows)
    ]


def reference(module, steps, optimizer, scale=None):
    """Training by hand on chunks: the mean of their gradients, whatever their lengths."""
    module = copy.deepcopy(module)
    optimizer = optimizer(list(module.parameters()))
    for parts in steps:
        optimizer.zero_grad()
        for part in parts:
            (module(**part)["loss"] * (scale or 1 / len(parts))).backward()
        optimizer.step()
    return module


def assert_like(exe, module):
    """Every device's parameters are those of `module`."""
    names = [name for name, _ in module.named_parameters()]
    values = exe.run(names, batch(99), return_merged=False)
    for name, devices in zip(names, values, strict=True):
        for value in devices:
            np.testing.assert_allclose(value, module.get_parameter(name).detach(), rtol=0, atol=1e-6)
            assert np.array_equal(value, devices[0])


def sharing(exe, program):
    return static.ParallelExecutor(False, main_program=program.clone(for_test=True), share_vars_from=exe)
