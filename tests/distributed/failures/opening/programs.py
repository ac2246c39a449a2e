"""What is trained, and its batches. Knows no failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dpfuse

__all__ = ["LR", "PROGRAMS", "Bare", "Halting", "Pass", "Program"]

SMALL = {"comm_buffer_size": 0.0001, "last_comm_buffer_size": 0.0001}  # about a bucket for each layer
STALL = 5.0  # seconds after which ranks that wait for different things raise an error
MICRO_BATCHES = 6  # at least two for each of three ranks
LR = 2.0**-4  # a power of two, so that a gradient can be told from two weights


class Net(nn.Module):
    """Three layers, and a parameter that a loss may use directly.

    Attributes:
        inside: called in each forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.inside: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.inside()
        return x * self.scale


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=True)
        self.inside()
        return self.layers[2](x) * self.scale


class Branches(Net):
    """Even batches leave a layer out, so that ranks use different parameters."""

    def forward(self, x: Tensor) -> Tensor:
        even = bool(x[0, 0] > 0)
        x = self.layers[0](x)
        self.inside()
        return self.layers[2](x if even else self.layers[1](x)) * self.scale


class Halting(torch.optim.SGD):
    """SGD whose step calls `halt` when it has updated half of the parameters."""

    halt: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for number, param in enumerate(params):
                if number == len(params) // 2:
                    Halting.halt()
                param.add_(param.grad, alpha=-group["lr"])


def dealt(rank: int, size: int) -> range:
    """Return the numbers of the micro-batches of a rank."""
    own = MICRO_BATCHES // size
    return range(rank * own, (rank + 1) * own)


class Bare:
    """The module of one rank without the library, in place of a wrapper."""

    def __init__(self, module: nn.Module, rank: int, size: int) -> None:
        self.module = module
        self.zero_grad = module.zero_grad
        self.no_sync = nullcontext
        self._numbers = dealt(rank, size)

    def micro_batches(self, step: int) -> range:
        return self._numbers

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)


class Pass:
    """One batch of one rank, on its way through a model.

    Args:
        model: a wrapper, or `Bare`.
        rank, size: whose batch it is, and the number of ranks.
        number: of the batch, from 1. No two batches are equal.
        dummy: the part of the step in which a small batch times zero is in its place; empty for none.
    """

    def __init__(self, model: Any, rank: int, size: int, number: int, dummy: str = "") -> None:
        self.model = model
        self.micro_batches = dealt(rank, size)
        self.number = number
        self.dummy = dummy
        self._rank = rank

    def batch(self, micro: int = 0) -> Tensor:
        """Return the batch, or one of several."""
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * self.number + 100 * micro + self._rank))
        x[0, 0] = 1.0 if (self._rank + self.number) % 2 else -1.0
        return x

    def forward(self, x: Tensor, part: str) -> Tensor:
        """Return the outputs; `part` is the part of the step."""
        return self.model(x[:1]) * 0 if part == self.dummy else self.model(x)

    def backward(self, loss: Tensor, part: str, **how: bool) -> None:
        """Run the backward of a part of the step."""
        loss.backward(**how)


@dataclass(frozen=True)
class Program:
    """What is trained.

    Attributes:
        build: makes the module.
        options: of the wrapper.
        face: the class of the wrapper.
        step: runs the forwards and backwards of one step.
        sharded: whether there is a `ShardedOptimizer`.
        parts: of a step: "local" is a backward without averaging.
        micro_batches: whether their number in a step is fixed.
    """

    build: Callable[[], nn.Module] = Net
    options: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    face: str = "DataParallel"
    step: Callable[[Pass], None] = lambda one: one.backward(loss_of(one.forward(one.batch(), "averaged")), "averaged")
    sharded: bool = False
    parts: tuple[str, ...] = ("averaged",)
    micro_batches: bool = False

    def made(self) -> nn.Module:
        """Make the module, with the same weights each time."""
        torch.manual_seed(0)
        return self.build()

    def wrapped(self) -> Any:
        """Make and wrap the module."""
        options = dict(self.options)
        if self.face == "DistributedDataParallel":
            options = {"bucket_cap_mb": 0.0001, **{k: v for k, v in options.items() if k not in SMALL}}
        if self.micro_batches:
            options["fixed_micro_batches"] = MICRO_BATCHES
        return getattr(dpfuse, self.face)(self.made(), stall_timeout=STALL, **options)

    def terms(self, size: int) -> int:
        """Return how many gradients of backwards of `size` ranks are one mean."""
        return MICRO_BATCHES if self.micro_batches else size


def window(one: Pass) -> None:
    """Two backwards, of which the second averages."""
    with one.model.no_sync():
        one.backward(loss_of(one.forward(one.batch(), "local")), "local")
    one.backward(loss_of(one.forward(one.batch(1), "averaged")), "averaged")


def micro(one: Pass) -> None:
    """The micro-batches of this rank, of which the last one averages."""
    for number in one.model.micro_batches(one.number):
        part = "averaged" if number == one.micro_batches[-1] else "local"
        one.backward(loss_of(one.forward(one.batch(number), part)), part)


def direct(one: Pass) -> None:
    """The loss uses a parameter directly, which may be ready before any output is reached."""
    outputs = one.forward(one.batch(), "averaged")
    one.backward(loss_of(outputs) + one.model.module.scale.square().sum(), "averaged")


def twice(one: Pass) -> None:
    """Two backwards through one graph, of which the second has no forward of its own."""
    loss = loss_of(one.forward(one.batch(), "averaged"))
    one.backward(loss, "before", retain_graph=True)
    one.model.zero_grad()
    one.backward(loss, "averaged")


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


WINDOW = "local", "averaged"

PROGRAMS = {
    "views": Program(),
    "one bucket": Program(options={}),
    "private": Program(options={**SMALL, "gradient_as_bucket_view": False}),
    "ddp": Program(face="DistributedDataParallel"),
    "unused": Program(Branches, {**SMALL, "find_unused_parameters": True}),
    "window": Program(step=window, parts=WINDOW),
    "accumulating": Program(step=window, options={**SMALL, "accumulate_in_buckets": True}, parts=WINDOW),
    "micro-batches": Program(step=micro, parts=WINDOW, micro_batches=True),
    "reentrant": Program(Checkpointed),
    "direct": Program(step=direct),
    "twice": Program(step=twice),
    "sharded": Program(sharded=True),
    "checks": Program(options={**SMALL, "check_finite": "raise", "metrics": 1}),
}
