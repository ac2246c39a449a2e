"""What is trained: programs that skip a batch whose step has raised, and one that tries it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dpfuse

__all__ = ["PROGRAMS", "Program", "batch"]

Armed = Callable[[str], AbstractContextManager[object]]  # around what may raise, by the name of the place
SMALL = {"comm_buffer_size": 0.0001, "last_comm_buffer_size": 0.0001}  # about a bucket for each layer
STALL = 5.0  # seconds after which ranks that wait for different things raise an error


class Net(nn.Module):
    """Three layers, and a parameter that a loss may use directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=True)
        return self.layers[2](x) * self.scale


class Branches(Net):
    """Even batches leave a layer out, so that ranks use different parameters."""

    def forward(self, x: Tensor) -> Tensor:
        even = bool(x[0, 0] > 0)
        x = self.layers[0](x)
        return self.layers[2](x if even else self.layers[1](x)) * self.scale


@dataclass(frozen=True)
class Program:
    """What is trained.

    Attributes:
        build: makes the module.
        options: of the wrapper.
        face: the class of the wrapper.
        step: runs one step of the wrapped module; without it, a forward and a backward.
        sharded: whether there is a `ShardedOptimizer`.
        retries: whether the program tries a batch again after an error.
        places: where a step may raise.
    """

    build: Callable[[], nn.Module] = Net
    options: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    face: str = "DataParallel"
    step: Callable[[Any, Tensor, Armed], None] | None = None
    sharded: bool = False
    retries: bool = False
    places: tuple[str, ...] = ("backward",)

    def wrapped(self) -> Any:
        """Make and wrap the module."""
        torch.manual_seed(0)
        options = dict(self.options)
        if self.face == "DistributedDataParallel":
            options = {"bucket_cap_mb": 0.0001, **{k: v for k, v in options.items() if k not in SMALL}}
        return getattr(dpfuse, self.face)(self.build(), stall_timeout=STALL, **options)

    def run(self, model: Any, x: Tensor, armed: Armed) -> None:
        """Run one step."""
        (self.step or plain)(model, x, armed)


def plain(model: Any, x: Tensor, armed: Armed) -> None:
    loss = loss_of(model(x))
    with armed("backward"):
        loss.backward()


def window(model: Any, x: Tensor, armed: Armed) -> None:
    """A window of two backwards; after an error in the first one it begins again with the next batch."""
    with model.no_sync():
        loss = loss_of(model(x))
        with armed("local"):
            loss.backward()
    loss = loss_of(model(x * 0.5))
    with armed("backward"):
        loss.backward()


def direct(model: Any, x: Tensor, armed: Armed) -> None:
    """The loss uses a parameter directly, which may be ready before any output is reached."""
    loss = loss_of(model(x)) + model.module.scale.square().sum()
    with armed("backward"):
        loss.backward()


def twice(model: Any, x: Tensor, armed: Armed) -> None:
    """Two backwards through one graph, of which the second has no forward of its own."""
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    model.zero_grad()
    with armed("backward"):
        loss.backward()


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


PROGRAMS = {
    "views": Program(),
    "one bucket": Program(options={}),
    "private": Program(options={**SMALL, "gradient_as_bucket_view": False}),
    "ddp": Program(face="DistributedDataParallel"),
    "unused": Program(Branches, {**SMALL, "find_unused_parameters": True}),
    "window": Program(step=window, places=("local", "backward")),
    "accumulating": Program(
        step=window, options={**SMALL, "accumulate_in_buckets": True}, places=("local", "backward")
    ),
    "reentrant": Program(Checkpointed),
    "direct": Program(step=direct),
    "twice": Program(step=twice),
    "sharded": Program(sharded=True),
    "checks": Program(options={**SMALL, "check_finite": "raise", "metrics": 1}),
    "again": Program(retries=True),
}


def batch(rank: int, step: int) -> Tensor:
    """The batch of one rank; no two are equal."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    x[0, 0] = 1.0 if (rank + step) % 2 else -1.0
    return x
