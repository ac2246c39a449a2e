"""What the planted and the healthy programs have in common: a small model, batches of each rank, and a plain loop."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse


def net():
    """Two layers, of 8 and 3 outputs, for inputs of 4 numbers; the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def seeded(rank, number=0):
    return torch.Generator().manual_seed(1000 * number + rank + 1)


def batches(length=1000, rank=None, number=0):
    """Inputs [5, 4] and targets [5, 3], other ones on each rank."""
    generator = seeded(dist.get_rank() if rank is None else rank, number)
    for _ in range(length):
        yield torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)


def loss_of(outputs, targets):
    return (outputs - targets).square().mean()


def trained(lr=0.01, model=None, optimizer=torch.optim.SGD, kind=None, **options):
    """Return a wrapped model and its optimizer; the command line may ask for dpfuse's class."""
    kind = kind or (dpfuse.DistributedDataParallel if "ours" in sys.argv[2:] else DistributedDataParallel)
    model = kind(net() if model is None else model, **options)
    return model, optimizer(model.parameters(), lr=lr)


def train(model, optimizer, data=None):
    """Step on each batch of `data`, or of `batches()`, as a plain program does."""
    for x, y in batches() if data is None else data:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def run(programs):
    """Run the program that the command line names; the doctor ends it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    programs[sys.argv[1]](dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
