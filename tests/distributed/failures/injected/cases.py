"""What is trained while a rank fails: a module, the wrapper's options, and in which backward it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CASES", "EXACT", "Case", "inputs"]

SMALL = {"comm_buffer_size": 0.001, "last_comm_buffer_size": 0.0005}  # a bucket for each layer of `chain`
EXACT = 1e-6  # of the largest element: the mean of two or three float32 numbers, in another order
STALL = 5.0  # seconds after which ranks that wait for different things raise an error


def chain() -> nn.Module:
    """Four layers of about 1 KB each."""
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def wide() -> nn.Module:
    """One gradient of more than 2 MB, which feeds and exchanges may treat on its own."""
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 66_000))


class Branches(nn.Module):
    """Rank 0 uses the first and the second branch, the other ranks use the first; no rank uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        used = self.branches[:2] if self.rank == 0 else self.branches[:1]
        return torch.stack([branch(x) for branch in used]).sum(0)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        build: makes the module.
        options: of `dpfuse.DataParallel`, or of `fused_allreduce_gradients`.
        steps: the synchronised backwards in which a rank is to fail; 1 is the recorded one.
        window: whether a step is one backward inside `no_sync()` and a synchronised one.
        local: whether the rank fails in the former.
        manual: whether a step is a backward of the bare module and `fused_allreduce_gradients`.
        tolerance: the largest error, as a part of the largest element of a gradient.
    """

    build: Callable[[], nn.Module] = chain
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, ...] = (1, 3)
    window: bool = False
    local: bool = False
    manual: bool = False
    tolerance: float = EXACT


CASES = {
    "views": Case(),
    "buckets": Case(options=SMALL),
    "private": Case(options={**SMALL, "gradient_as_bucket_view": False}),
    "bfloat16": Case(options={**SMALL, "wire_dtype": torch.bfloat16}, tolerance=2e-2),
    "deterministic": Case(options={**SMALL, "deterministic": True}),
    "window": Case(options=SMALL, window=True),
    "local": Case(options=SMALL, steps=(2,), window=True, local=True),
    "accumulating": Case(options={**SMALL, "accumulate_in_buckets": True}, window=True),
    "accumulating-local": Case(options={**SMALL, "accumulate_in_buckets": True}, steps=(2,), window=True, local=True),
    "unused": Case(Branches, {**SMALL, "find_unused_parameters": True}),
    "checks": Case(options={**SMALL, "check_finite": "raise"}),
    "wide": Case(wide),
    "wide-private": Case(wide, {"gradient_as_bucket_view": False}),
    "manual": Case(options={"bucket_size": 0}, steps=(1, 2), manual=True),
    "manual-bfloat16": Case(
        options={"bucket_size": 0, "wire_dtype": torch.bfloat16}, steps=(1, 2), manual=True, tolerance=2e-2
    ),
    "manual-deterministic": Case(options={"bucket_size": 1024, "deterministic": True}, steps=(1, 2), manual=True),
    "manual-wide": Case(wide, steps=(1, 2), manual=True),
}


def inputs(step: int, batch: int, rank: int) -> Tensor:
    """The batch of one rank; no two are equal."""
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(1000 * step + 100 * batch + rank))
