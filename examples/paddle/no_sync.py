"""Gradients accumulated without communication, then averaged once: the example of `paddle.DataParallel.no_sync`.

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/no_sync.py

Two lines differ from the document. Torch needs a single number as the loss, so the outputs are summed. And the program
checks that the sum of both backwards is averaged.
"""

from __future__ import annotations

import torch
from report import say
from torch import nn

import dpfuse.paddle as paddle
import dpfuse.paddle.distributed as dist


class SimpleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._linear = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


def main() -> None:
    dist.init_parallel_env()
    device = dist.ParallelEnv().device_type
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = paddle.DataParallel(SimpleNet().to(device))
    weight = next(model.parameters())
    first = torch.full((10, 10), rank + 1.0, device=device)
    second = torch.full((10, 10), 100.0, device=device)

    with model.no_sync():
        model(first).sum().backward()
    local = weight.grad[0, 0].item()

    model(second).sum().backward()  # synchronised: averages the sum of both backwards
    averaged = weight.grad[0, 0].item()

    assert local == 10 * (rank + 1), "the first backward was synchronised"
    assert averaged == 10 * (world_size + 1) / 2 + 1000, "the mean is not that of both backwards"
    say(f"gradient {local:g} of its own, then {averaged:g} on all")


if __name__ == "__main__":
    main()
