"""Output and checks of the examples in this folder."""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["fingerprint", "say"]


def say(text: str) -> None:
    """Print a line that begins with the rank, in one write, so that lines of other ranks cannot split it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sys.stdout.write(f"rank {rank}: {text}\n")


def fingerprint(model: nn.Module) -> str:
    """Return eight digits for the weights of `model`. With several ranks, all of them must call it.

    Buffers do not count: as in Paddle, each rank has its own running statistics.

    Raises:
        RuntimeError: The ranks' weights differ.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    name = digest.hexdigest()[:8]
    if dist.is_initialized():
        mine = torch.tensor(int(name, 16), device=next(model.parameters()).device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        names = [f"{int(other):08x}" for other in everyone]
        if len(set(names)) > 1:
            raise RuntimeError(f"the ranks hold different weights: {', '.join(names)}")
    return name
