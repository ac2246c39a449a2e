"""Trainings whose backwards are all inside no_sync(): the first argument says of which kind, the second how long."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse.loop import weights_at_exit


def mean(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class AveragingSGD(torch.optim.SGD):
    """Averages gradients inside its step, as optimizers do that compress them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = mean(param.grad)
        return super().step(closure)


def train(kind: str, steps: int) -> None:
    rank, group = dist.get_rank(), None
    if kind == "last_two":
        group = dist.new_group([1, 2])
        if not rank:
            return
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = dpfuse.DistributedDataParallel(net, process_group=group)
    optimizer = (AveragingSGD if kind == "in_the_step" else torch.optim.SGD)(model.parameters(), lr=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 4))
    if kind == "in_hooks":
        for param in model.parameters():
            param.register_hook(mean)
    torch.manual_seed(0 if kind == "same_batches" else rank)
    for step in range(steps):
        optimizer.zero_grad()
        averaged = kind == "one_average" and step == steps - 1
        with nullcontext() if averaged else model.no_sync():
            model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        warm_up.step()
        if step % 50 == 49:  # ranks that average nothing do not wait for each other, and one may end far too early
            dist.barrier(group)
        if kind == "local_sgd" and step % 10 == 9:
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(mean(param))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if sys.argv[3:]:
        weights_at_exit.STEPS = int(sys.argv[3])
    train(sys.argv[1], int(sys.argv[2]))
    print("the training has ended", file=sys.stderr, flush=True)
    dist.destroy_process_group()
