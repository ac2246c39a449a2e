"""The gradients of each way of use on the pretended device are those that the CPU computes, from the same weights."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.pretended_gpu.test_ways import pytestmark  # noqa: F401  # the mark of these tests, too
from tests.pretended_gpu.values import Values, compute_kernels
from tests.pretended_gpu.ways import WAYS, WIDTH, plain

LEFT_OUT = {
    "compiled": "torch.compile traces below the mode that computes",
    **dict.fromkeys(
        [
            "deterministic",
            "bfloat16 wire, float32 sum",
            "float8 wire",
            "error feedback, float8",
            *(name for name in WAYS if name.startswith("sharded")),
        ],
        "each rank adds up a part of each sum, and the ranks that have the other parts do not exist",
    ),
}
NARROW = {"bfloat16 wire", "error feedback", "comm hook", "bfloat16 model"}
STEPS = 4


class Bare(nn.Module):
    """The module alone, with what the steps of a program ask of a wrapper. Ranks are equal, so their mean is this."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scaler = self

    def forward(self, x):
        return self.module(x)

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


def expected_of(way, module):
    """Return the gradients that the CPU computes from the weights of a module on the device."""
    torch.manual_seed(0)
    bare = way.network().to(dtype=way.dtype)
    bare.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})
    model = Bare(bare)
    (way.step or plain)(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(8, WIDTH, dtype=way.dtype))
    return [None if param.grad is None else param.grad for param in bare.parameters()]


@pytest.mark.parametrize("name", [name for name in WAYS if name not in LEFT_OUT])
def test_gradients_are_those_of_the_cpu(name, monkeypatch):
    compute_kernels(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # its operations have no twin on the CPU
    way = WAYS[name]
    with Values():
        torch.manual_seed(0)
        module = way.network().to("cuda", way.dtype)
        step = way.run(module=module)
        for number in range(STEPS):
            expected = expected_of(way, module)
            step()
            apart = distance([param.grad for param in module.parameters()], expected, 4.0 if name == "factor" else 1.0)
            assert apart < (1e-2 if name in NARROW else 1e-6), f"step {number}"
        assert any(want is not None and want.any().item() for want in expected)


def distance(grads, expected, factor):
    """Return how far the gradients are from `factor` times those expected, over the largest of each, at most."""
    found = [0.0]
    for grad, want in zip(grads, expected, strict=True):
        if grad is None or want is None:
            found.append(0.0 if grad is want else float("inf"))
        else:
            want = factor * want.double()
            error = (grad.cpu().double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
            found.append(error.nan_to_num(float("inf")).item())
    return max(found)
