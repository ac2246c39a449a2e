"""LinearNet on ranks that Python starts: the spawn program of "single-machine multi-card training".

    python examples/paddle/linear_net_spawn.py
    python examples/paddle/linear_net_spawn.py --usage 1 2 3 4

The four usages are those of the document. Usage 4 names cards 4 and 5. If there are GPUs, these two must exist. On a
machine without GPUs, two ranks run on the CPU, with one warning.
"""

from __future__ import annotations

import argparse

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


def train(print_result: bool = False) -> str:
    """Train one step on this rank's data. Return the fingerprint of the weights after it."""
    dist.init_parallel_env()
    device = dist.ParallelEnv().device_type

    model = paddle.DataParallel(LinearNet().to(device))
    loss_fn = nn.MSELoss()
    adam = torch.optim.Adam(model.parameters(), lr=0.001)

    outputs = model(torch.randn(10, 10, device=device))
    loss = loss_fn(outputs, torch.randn(10, 1, device=device))
    if print_result:
        say(f"loss {loss.item():.6f}")
    loss.backward()

    adam.step()
    adam.zero_grad()
    return fingerprint(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="The four usages of spawn.")
    parser.add_argument("--usage", type=int, nargs="+", choices=[1, 2, 3, 4], default=[3])
    for usage in parser.parse_args().usage:
        if usage == 1:  # only the function, on all visible GPUs, or on all cores without GPUs
            context = dist.spawn(train)
        elif usage == 2:  # with arguments
            context = dist.spawn(train, args=(True,))
        elif usage == 3:  # with a number of ranks
            context = dist.spawn(train, args=(True,), nprocs=2)
        else:  # with a list of cards
            context = dist.spawn(train, args=(True,), nprocs=2, gpus="4,5")
        weights = [queue.get() for queue in context.return_queues]
        print(f"usage {usage}: {len(weights)} ranks hold the weights {', '.join(sorted(set(weights)))}")


if __name__ == "__main__":
    main()
