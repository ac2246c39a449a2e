"""Small models and batches for the programs of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Wrapping", "batch", "batches", "loss_of", "mlp", "seeded", "train", "with_sgd"]


def seeded(rank: int, number: int = 0) -> torch.Generator:
    """A generator of this rank."""
    return torch.Generator().manual_seed(1000 * number + rank + 1)


def mlp() -> nn.Module:
    """Two layers, of 8 and 3 outputs, for inputs of 4 numbers."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(generator: torch.Generator, count: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs [count, 4] and targets [count, 3]."""
    return torch.randn(count, 4, generator=generator), torch.randn(count, 3, generator=generator)


def batches(rank: int, length: int, number: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """`length` batches of this rank, other ones for another number."""
    generator = seeded(rank, number)
    for _ in range(length):
        yield batch(generator)


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's: torch's constructor is not called, so it has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the other one."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of the other one."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """As that of the other one."""
        self.optimizer.step(closure)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the squared errors."""
    return (outputs - targets).square().mean()


def with_sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and an optimizer of its parameters."""
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    window: int = 1,
) -> None:
    """The loop of most programs: a step after each `window` batches, of which the last one is synchronised."""
    for index, (x, y) in enumerate(loader):
        last = (index + 1) % window == 0
        with model.no_sync(enabled=not last):
            loss_of(model(x), y).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
