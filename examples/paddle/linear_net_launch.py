"""LinearNet on ranks that the launcher starts: the example of `paddle.DataParallel` and of `init_parallel_env`.

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/linear_net_launch.py

Except for names, one thing differs from the document: torch has no global device, so the network and data are moved.
"""

from __future__ import annotations

import torch
from report import fingerprint, say
from torch import nn

import dpfuse.paddle as paddle
import dpfuse.paddle.distributed as dist


class LinearNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._linear1 = nn.Linear(10, 10)
        self._linear2 = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear2(self._linear1(x))


def train() -> None:
    # 1. join the ranks
    dist.init_parallel_env()
    device = dist.ParallelEnv().device_type

    # 2. wrap the network
    model = paddle.DataParallel(LinearNet().to(device))
    loss_fn = nn.MSELoss()
    adam = torch.optim.Adam(model.parameters(), lr=0.001)

    # 3. a step on this rank's data
    outputs = model(torch.randn(10, 10, device=device))
    loss = loss_fn(outputs, torch.randn(10, 1, device=device))
    loss.backward()  # averages the gradients over the ranks

    adam.step()
    adam.zero_grad()
    say(f"loss {loss.item():.6f}, weights {fingerprint(model)}")


if __name__ == "__main__":
    train()
