"""The rule of averaging, by hand, for the plain modules of random programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["average", "changed", "gradients_of"]


def gradients_of(params: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """Return copies of the gradients, by name; None where there is none."""
    return {name: None if param.grad is None else param.grad.clone() for name, param in params.items()}


def changed(params: Mapping[str, nn.Parameter], before: Mapping[str, Tensor | None]) -> set[str]:
    """Return the names of the parameters whose gradients are others than `before`."""
    found = set()
    for name, param in params.items():
        old = before[name]
        if param.grad is not None and (old is None or not torch.equal(old, param.grad)):
            found.add(name)
    return found


def average(params: Mapping[str, nn.Parameter], accumulated: Iterable[str]) -> None:
    """Give the parameters the mean of the ranks' gradients; one that no rank has in `accumulated` keeps its own."""
    accumulated = set(accumulated)
    for name, param in params.items():
        wanted = torch.tensor(float(name in accumulated))
        dist.all_reduce(wanted)
        if wanted:
            mean = (torch.zeros_like(param) if param.grad is None else param.grad) / dist.get_world_size()
            dist.all_reduce(mean)
            if param.grad is None:
                param.grad = mean.detach()
            else:
                param.grad.copy_(mean)
