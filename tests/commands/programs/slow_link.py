"""A training on one rank whose collectives take as long as a link needs: seconds per message, and bytes per second."""

import contextlib
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.network import simulated_network


def main():
    latency, rate, width = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
    with simulated_network(lambda nbytes: latency + nbytes / rate):
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        count = int(sys.argv[4]) if len(sys.argv) > 4 else 1  # batches that are averaged together
        for index in range(1000 * count):
            with contextlib.nullcontext() if (index + 1) % count == 0 else model.no_sync():
                model(torch.randn(16, width)).square().mean().backward()
            if (index + 1) % count == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
