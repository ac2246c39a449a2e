"""A sharded optimizer beside torch's DDP and the plain optimizer, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse

__all__ = ["bits_differ", "network", "trained_beside"]

DDP = nn.parallel.DistributedDataParallel


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Weights, biases, a parameter of one number, and one that lies channels last."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.norm = nn.BatchNorm2d(8)
            self.first = nn.Linear(8 * 16, 300)
            self.second = nn.Linear(300, 177)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.last = nn.Linear(177, 5)

        def forward(self, images: Tensor) -> Tensor:
            hidden = torch.tanh(self.norm(self.conv(images))).flatten(1)
            return self.last(torch.tanh(self.second(torch.tanh(self.first(hidden)))) * self.scale)

    torch.manual_seed(0)
    return Network().to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def bits_differ(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) != len(others) or not all(map(torch.equal, tensors, others))


def trained_beside(
    kind: type[torch.optim.Optimizer],
    steps: int,
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    face: Any = dpfuse.DataParallel,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    peer: Any = DDP,
    micro: int = 1,
    extra: dict[str, Any] | None = None,
    around: Callable[[int, nn.Module, torch.optim.Optimizer], None] = lambda step, model, optimizer: None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    **settings: Any,
) -> tuple[list[int], nn.Module, Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train two copies, and return the steps after which their bits differ on this rank.

    Args:
        extra: arguments of the sharded optimizer alone.
        around: called for each copy between its backward and its step.
    """
    rank = dist.get_rank()
    theirs = peer(network(dtype))
    sizes = {"comm_buffer_size": 0.1, "last_comm_buffer_size": 0.02}
    if face is dpfuse.DistributedDataParallel:
        sizes = {"bucket_cap_mb": 0.1}
    ours = face(copy.deepcopy(theirs.module), **sizes | (options or {}))
    plain = kind(theirs.parameters() if groups is None else groups(theirs.module), **settings)
    sharded = dpfuse.ShardedOptimizer(
        ours, kind, None if groups is None else groups(ours.module), **(extra or {}), **settings
    )
    schedulers = [] if scheduler is None else [scheduler(plain), scheduler(sharded)]
    differing = []
    for step in range(steps):
        for model, optimizer in ((theirs, plain), (ours, sharded)):
            for number in range(micro):
                if number < micro - 1:
                    with model.no_sync():
                        model(batch(micro * step + number, rank, dtype)).square().mean().backward()
                else:
                    model(batch(micro * step + number, rank, dtype)).square().mean().backward()
            around(step, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        for each in schedulers:
            each.step()
        if bits_differ([*theirs.module.parameters()], [*ours.module.parameters()]):
            differing.append(step)
    return differing, theirs, ours, plain, sharded
