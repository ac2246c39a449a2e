"""The gradients of each way of use on the pretended device are those that the CPU computes, from the same weights.

The other rank holds three times the gradients of this one, so that a gradient that was not averaged is seen.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.pretended_gpu.device import peers_holding
from tests.pretended_gpu.test_ways import pytestmark  # noqa: F401  # the mark of these tests, too
from tests.pretended_gpu.values import Values, compute_kernels
from tests.pretended_gpu.ways import WAYS, WIDTH, Way, plain, wrapped

LEFT_OUT = {
    "compiled": "torch.compile traces below the mode that computes",
    **dict.fromkeys(
        [
            "deterministic",
            "bfloat16 wire, float32 sum",
            "float8 wire",
            "error feedback, float8",
            *(name for name in WAYS if name.startswith(("sharded", "fixed micro-batches"))),
        ],
        "each rank adds up a part of each sum, and the ranks that have the other parts do not exist",
    ),
}
NARROW = {"bfloat16 wire", "error feedback", "comm hook", "bfloat16 model"}
STEPS = 4


class Complex(nn.Module):
    """A module with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        parts = torch.view_as_real(self.weight)  # other functions of complex numbers are compiled on the device
        return x.real * parts[:, 0] + 2 * x.real * parts[:, 1]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


MORE = {
    "complex": Way(wrapped(), Complex, make=sgd, dtype=torch.complex64),
    "complex, private": Way(wrapped(gradient_as_bucket_view=False), Complex, make=sgd, dtype=torch.complex64),
}
WITH_VALUES = {name: way for name, way in {**WAYS, **MORE}.items() if name not in LEFT_OUT}


class Bare(nn.Module):
    """The module alone, with what the steps of a program ask of a wrapper.

    All losses of these programs are linear in the output, so a multiple of it has that multiple of the gradients.
    """

    def __init__(self, module: nn.Module, mean: float) -> None:
        super().__init__()
        self.module = module
        self.mean = mean
        self.scaler = self

    def forward(self, x):
        return self.mean * self.module(x)

    def no_sync(self):
        return nullcontext()

    def clip_grad_norm_(self, norm):
        return nn.utils.clip_grad_norm_(self.parameters(), norm)

    def set_gradient_weight(self, weight):
        """The weights of all ranks are equal."""

    def scale(self, loss):
        return loss

    def step(self, optimizer):
        """Nothing is trained."""

    def update(self):
        """There is no scale."""


def expected_of(way, module, mean):
    """Return the gradients that the CPU computes from the weights of a module on the device, `mean` times."""
    torch.manual_seed(0)
    bare = way.network().to(None if way.dtype.is_complex else way.dtype)
    bare.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})
    model = Bare(bare, mean)
    (way.step or plain)(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(8, WIDTH, dtype=way.dtype))
    return [None if param.grad is None else param.grad for param in bare.parameters()]


@pytest.mark.parametrize("name", WITH_VALUES)
def test_gradients_are_those_of_the_cpu(name, monkeypatch):
    compute_kernels(monkeypatch.setattr)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # its operations have no twin on the CPU
    way = WITH_VALUES[name]
    # The mean of g and 3 g. A weighted mean divides by the weights, which the other rank has three times, too. A scale
    # of 2 multiplies the sum.
    mean = {"weight": 1.0, "factor": 8.0}.get(name, 2.0)
    with peers_holding(3.0), Values():
        torch.manual_seed(0)
        module = way.network().to(dtype=None if way.dtype.is_complex else way.dtype, device="cuda")
        step = way.run(module=module)
        for number in range(STEPS):
            expected = expected_of(way, module, mean)
            step()
            apart = distance([param.grad for param in module.parameters()], expected)
            assert apart < (1e-2 if name in NARROW else 1e-6), f"step {number}"
        assert any(want is not None and want.any().item() for want in expected)


def wide(tensor):
    """Return a tensor in double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def distance(grads, expected):
    """Return how far the gradients are from those expected, over the largest of each, at most."""
    found = [0.0]
    for grad, want in zip(grads, expected, strict=True):
        if grad is None or want is None:
            found.append(0.0 if grad is want else float("inf"))
        else:
            grad, want = (wide(each) for each in (grad.cpu(), want))
            error = (grad - want).abs().max() / want.abs().max().clamp(min=1e-30)
            found.append(error.nan_to_num(float("inf")).item())
    return max(found)
