"""A small training with switches for what can be wrong with a program."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PARSER = argparse.ArgumentParser()
PARSER.add_argument("--steps", type=int, default=1000)
PARSER.add_argument("--wrong", default="")
PARSER.add_argument("--out")
PARSER.add_argument("--width", type=int, default=64)


class Net(nn.Module):
    def __init__(self, width, unused):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.last = nn.Linear(width, 4)
        if unused:
            self.never = nn.Linear(width, 4)

    def forward(self, inputs):
        return self.last(self.layers(inputs))


class Derived(DistributedDataParallel):
    """What some libraries wrap with, such as mmengine."""


def main():
    args = PARSER.parse_args()
    wrong = args.wrong
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if wrong != "unseeded":
        torch.manual_seed(0)
    net = Net(args.width, wrong == "unused")
    checkpoint = os.path.join(args.out, "checkpoint.pt") if args.out else None
    if checkpoint and os.path.exists(checkpoint):
        net.load_state_dict(torch.load(checkpoint))
    kind = Derived if wrong == "derived" else DistributedDataParallel
    model = kind(net, find_unused_parameters=wrong == "unused") if wrong != "no wrapper" else net
    ours = "dpfuse" in type(model).__module__
    if wrong == "needs torch" and ours:
        raise TypeError("only torch's own class will do")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank + 1)
    for step in range(args.steps):
        if wrong == "fails" and step == 3:
            raise ValueError(f"no more data on rank {rank}")
        if step == 3 and (wrong == "hangs" or (wrong == "hangs under dpfuse" and ours)):
            time.sleep(1000)
        inputs = torch.randn(8, 16)
        loss = nn.functional.cross_entropy(model(inputs), torch.randint(4, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if wrong == "drift" and rank == 1 and step == 5:
            with torch.no_grad():
                net.last.bias.add_(0.1)
        if checkpoint and rank == 0 and step % 5 == 4:
            torch.save(net.state_dict(), checkpoint)
    print("behind the loop", os.environ.get("DPFUSE_DOCTOR"), flush=True)
    if checkpoint:
        open(os.path.join(args.out, f"uploaded{rank}"), "w").close()
    sys.exit(5 if wrong == "exits" else 0)


if __name__ == "__main__":
    main()
