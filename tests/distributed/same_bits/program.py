"""One program that trains with a fixed number of micro-batches on any number of ranks, and tells every bit of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import dpfuse
from tests.distributed.same_bits.nets import NETS, batch, loss_of

__all__ = ["Case", "Told", "Training", "Unused", "combined", "digest", "state_of", "trained"]


@dataclass(frozen=True)
class Case:
    """What is trained. Its fields are words, so that a test can print it and send it to ranks."""

    net: str
    count: int  # micro-batches in a step
    dtype: str = "float32"
    optimizer: str = "AdamW"
    variation: str = "none"  # of VARIATIONS
    steps: int = 6

    def __str__(self) -> str:
        words = [self.net, self.optimizer, f"V={self.count}", self.dtype]
        return ", ".join(words if self.variation == "none" else [*words, self.variation])


@dataclass
class Told:
    """What one rank tells of a training: hashes, and what it has seen of each (step, number)."""

    weights: str
    states: str
    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    draws: dict[tuple[int, int], str] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)


OPTIMIZERS: dict[str, Callable[[dpfuse.DataParallel], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "Muon": lambda model: _sharded(model),
}


def _sharded(model: dpfuse.DataParallel) -> torch.optim.Optimizer:
    """Muon for matrices, and AdamW for the rest, in parts of all ranks."""
    params = list(model.parameters())
    matrices = {"params": [each for each in params if each.dim() == 2], "optimizer_class": torch.optim.Muon, "lr": 0.02}
    rest = {"params": [each for each in params if each.dim() != 2], "lr": 0.01}
    return dpfuse.ShardedOptimizer(model, torch.optim.AdamW, params=[matrices, rest])


class Training:
    """The usual loop. Variations override one of its parts.

    Args:
        case: what is trained.
        options: of the wrapper, beside the number of micro-batches.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype = getattr(torch, case.dtype)
        torch.manual_seed(7)
        net = NETS[case.net]().to(self.dtype)
        self.model = dpfuse.DataParallel(net, fixed_micro_batches=case.count, **self.options)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model)
        self.told = Told("", "")

    def run(self) -> Told:
        for step in range(self.case.steps):
            for number in self.model.micro_batches():
                self.note_draws(step, number)
                if hasattr(self.model.module, "number"):
                    self.model.module.number = number
                inputs, targets = batch(self.case.net, step, number, self.dtype)
                loss = loss_of(self.model(inputs), targets)
                self.backward(loss)
                self.told.losses[step, number] = digest([loss])
            self.note_draws(step, self.case.count)
            self.step()
            self.optimizer.zero_grad()
        self.told.weights = digest(state_of(self.model.module))
        self.told.states = digest(tensors_in(self.optimizer.state_dict()))
        return self.told

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def note_draws(self, step: int, number: int) -> None:
        values = (torch.rand(2).tolist(), random.random(), np.random.rand())
        self.told.draws[step, number] = repr(values)


class ClippedByTorch(Training):
    def step(self) -> None:
        self.told.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)).hex())
        super().step()


class ClippedByTheWrapper(Training):
    def step(self) -> None:
        self.told.norms.append(float(self.model.clip_grad_norm_(0.05)).hex())
        super().step()


class Scheduled(Training):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=case.steps + 1)

    def step(self) -> None:
        super().step()
        self.scheduler.step()


class Scaled(Training):
    """With torch's own GradScaler, which skips a step because one micro-batch has an infinite loss."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss: Tensor) -> None:
        infinite = max(self.told.draws) == (1, 1)  # the micro-batch that runs
        self.scaler.scale(loss * math.inf if infinite else loss).backward()

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.told.norms.append(self.scaler.get_scale().hex())


class SmallBuckets(Training):
    options: ClassVar[dict[str, Any]] = {"comm_buffer_size": 0.001, "last_comm_buffer_size": 0.0}


class NoViews(Training):
    options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": False}


class Unused(Training):
    options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


class UnusedInSmallBuckets(Training):
    options: ClassVar[dict[str, Any]] = {**Unused.options, **SmallBuckets.options}


VARIATIONS: dict[str, type[Training]] = {
    "none": Training,
    "clipped by torch": ClippedByTorch,
    "clipped by the wrapper": ClippedByTheWrapper,
    "scheduler": Scheduled,
    "GradScaler": Scaled,
    "small buckets": SmallBuckets,
    "no views": NoViews,
    "unused": Unused,
    "unused, small buckets": UnusedInSmallBuckets,
}


def trained(rank: int, size: int, cases: Sequence[Case]) -> list[Told]:
    """Train all cases, one after the other: what each rank is asked to run."""
    return [VARIATIONS[case.variation](case).run() for case in cases]


def combined(told: Sequence[Told]) -> Told:
    """Return what all ranks tell together. What they share must be equal."""
    first = told[0]
    for other in told[1:]:
        assert (other.weights, other.states, other.norms) == (first.weights, first.states, first.norms)
    losses = {key: value for each in told for key, value in each.losses.items()}
    draws: dict[tuple[int, int], str] = {}
    for each in told:
        for key, value in each.draws.items():
            assert draws.setdefault(key, value) == value, key
    return Told(first.weights, first.states, dict(sorted(losses.items())), dict(sorted(draws.items())), first.norms)


def state_of(module: nn.Module) -> list[Tensor]:
    return list(module.state_dict().values())


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors and numbers of a state dict, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for key in value for each in tensors_in(value[key])]
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in tensors_in(item)]
    return [torch.tensor(value)] if isinstance(value, (int, float)) else []


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of every bit."""
    total = sha256()
    for tensor in tensors:
        total.update(str(tensor.dtype).encode())
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
