"""The networks of the golden trajectories, in torch. Weights multiply from the right: `x @ W + b`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LOSSES", "GoldenNet", "make_optimizer"]


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * (1 - y * y)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy * (x.abs() <= 1)


class GoldenNet(nn.Module):
    """One of the golden networks, with the recorded initial weights."""

    def __init__(self, case: dict[str, Any], init: dict[str, Any]) -> None:
        super().__init__()
        for param in case["params"]:
            value = torch.tensor(init[param["name"]], dtype=getattr(torch, param["dtype"]))
            if case["net"] == "sparse" and param["name"] == "e":
                # In a module that announces sparse gradients; reachable by its recorded name too.
                self.embedding = nn.Embedding(*value.shape, sparse=True, _weight=value)
                object.__setattr__(self, "e", self.embedding.weight)
                continue
            self.register_parameter(param["name"], nn.Parameter(value, requires_grad=param["trainable"]))
        self.compute = getattr(self, f"_{case['net']}")
        if case["net"] == "bn":
            self.register_buffer("running_mean", torch.tensor(case["running_mean"]))
            self.register_buffer("running_var", torch.tensor(case["running_var"]))

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        return self.compute(x, use)

    def _mlp(self, x: Tensor, _use: list[int]) -> Tensor:
        h = torch.tanh(x @ self.w1 + self.b1)
        return torch.relu(h @ self.w2 + self.b2) @ self.w3 + self.b3

    def _mixed(self, x: Tensor, _use: list[int]) -> Tensor:
        h = torch.tanh(x @ self.w1 + self.b1).double()
        return torch.relu(h @ self.w2 + self.b2).float() @ self.w3 + self.b3

    def _conv(self, x: Tensor, _use: list[int]) -> Tensor:
        h = F.max_pool2d(torch.relu(F.conv2d(x, self.k, self.kb)), 2)
        return h.flatten(1) @ self.w + self.b

    def _branch(self, x: Tensor, use: list[int]) -> Tensor:
        h = torch.tanh(x @ self.w0 + self.b0)
        branches = [h @ self.wa + self.ba] * use[0] + [h @ self.wb + self.bb] * use[1]
        return sum(branches[1:], start=branches[0])

    def _sparse(self, x: Tensor, _use: list[int]) -> Tensor:
        return self.embedding(x).mean(1) @ self.w + self.b

    def _tied(self, x: Tensor, _use: list[int]) -> Tensor:
        return torch.tanh(self.e[x].mean(1) @ self.w + self.b) @ self.e.T

    def _pylayer_tanh(self, x: Tensor, _use: list[int]) -> Tensor:
        return Tanh.apply(x @ self.w1 + self.b1) @ self.w2 + self.b2

    def _pylayer_sign(self, x: Tensor, _use: list[int]) -> Tensor:
        return Sign.apply(x @ self.w1 + self.b1) @ self.w2 + self.b2

    def _pylayer_input(self, x: Tensor, _use: list[int]) -> Tensor:
        return Tanh.apply(x) @ self.w + self.b

    def _bn(self, x: Tensor, _use: list[int]) -> Tensor:
        h = x @ self.w1 + self.b1
        mean, var = h.mean(0), h.var(0, unbiased=False)
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(0.1 * mean)
            self.running_var.mul_(0.9).add_(0.1 * var)
        return torch.relu((h - mean) / torch.sqrt(var + 1e-5) * self.g + self.beta) @ self.w2 + self.b2


LOSSES = {"mse": F.mse_loss, "ce": F.cross_entropy, "mean": lambda y, _t: y.mean()}


def make_optimizer(spec: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    """The recorded optimizer, from torch."""
    if spec["name"] == "adam":
        return torch.optim.Adam(
            params, lr=spec["lr"], betas=(spec["beta1"], spec["beta2"]), eps=spec["epsilon"], foreach=False
        )
    return torch.optim.SGD(
        params, lr=spec["lr"], momentum=spec.get("momentum", 0), nesterov=spec.get("nesterov", False), foreach=False
    )
