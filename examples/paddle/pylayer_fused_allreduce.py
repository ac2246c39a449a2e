"""A custom autograd function, and gradients averaged by hand: the `PyLayer` example of `paddle.DataParallel`.

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/pylayer_fused_allreduce.py

Paddle's document recommends this for every model with a PyLayer: backward without synchronisation, then
`fused_allreduce_gradients`. Here a plain backward is also right. The program runs one at each step to show that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from report import fingerprint, say
from torch import nn

import dpfuse.paddle as paddle
import dpfuse.paddle.distributed as dist
from dpfuse.paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

STEPS = 10


class Tanh(torch.autograd.Function):
    """A custom autograd function, which Paddle calls a PyLayer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return dy * (1 - y.square())


class SimpleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tanh.apply(self.linear(x))


def main() -> None:
    dist.init_parallel_env()
    device = dist.ParallelEnv().device_type
    net = SimpleNet().to(device)
    twin = paddle.DataParallel(copy.deepcopy(net))
    model = paddle.DataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for _ in range(STEPS):
        x = torch.randn(2, 2, device=device)
        with model.no_sync():
            model(x).mean().backward()
        fused_allreduce_gradients(list(model.parameters()), None)

        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        twin(x).mean().backward()  # synchronised as usual
        for by_hand, synchronised in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(by_hand.grad, synchronised.grad)

        optimizer.step()
        optimizer.zero_grad()
    say(f"{STEPS} steps, gradients as of a plain backward, weights {fingerprint(model)}")


if __name__ == "__main__":
    main()
