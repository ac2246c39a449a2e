"""Whole programs with a sharded optimizer, beside the same programs with a plain one: all bits must be equal.

Each program is a class with a network, parameter groups and a loss; the rest is one loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import dpfuse
from tests.sharded.against_ddp import bits_differ

STEPS = 12
OPTIONS = {"comm_buffer_size": 0.02, "last_comm_buffer_size": 0.005}  # MB: several buckets


class Program(nn.Module):
    """Four layers. Subclasses change what happens in a step."""

    micro = 1
    options: ClassVar[dict[str, Any]] = {}
    settings: ClassVar[dict[str, Any]] = {"lr": 0.01, "weight_decay": 0.1}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(40, 70), nn.Linear(70, 70), nn.Linear(70, 40), nn.Linear(40, 3)])

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [param for param in self.parameters() if param.requires_grad]}]

    def before(self, step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Do what the program does before a step's forward."""

    def after(self, step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Do what it does between backward and the optimizer's step."""

    def called(self, model: nn.Module) -> Any:
        return model

    def backward(self, loss: Tensor, step: int, micro: int, rank: int) -> None:
        loss.backward()

    def update(self, optimizer: optim.Optimizer) -> None:
        optimizer.step()


class Accumulating(Program):
    """In the buckets, with parameters that no rank or one rank uses."""

    micro = 3
    options: ClassVar = {"accumulate_in_buckets": True, "find_unused_parameters": True}

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 or step % 3 == 0 or (step % 3 == 1 and rank == 0):
                x = torch.tanh(layer(x))
        return x


class Uneven(Accumulating):
    """The same with `.grad` as memory."""

    options: ClassVar = {"find_unused_parameters": True}


class Adversarial(Program):
    """Freezes the two halves in turn, as a training of two networks that compete."""

    def before(self, step, model, optimizer):
        for number, layer in enumerate(self.layers):
            layer.requires_grad_((number < 2) == (step % 2 == 0))


class Growing(Program):
    """Gets a layer, in a group of its own, and another network's layer in place of its last one."""

    def before(self, step, model, optimizer):
        torch.manual_seed(step)
        if step == 4:
            self.layers.insert(2, nn.Linear(70, 70))
            optimizer.add_param_group({"params": list(self.layers[2].parameters()), "lr": 0.003})
        if step == 8:
            self.layers[-1] = nn.Linear(40, 5)
            optimizer.add_param_group({"params": list(self.layers[-1].parameters())})


class Frozen(Program):
    """A base that never trains, beside an adapter; the base is left out of the optimizer."""

    def __init__(self):
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[2].requires_grad_(False)


class Tied(Program):
    """One matrix in two places."""

    def __init__(self):
        super().__init__()
        self.layers[1].weight = nn.Parameter(torch.randn(70, 70) / 10)
        self.layers.insert(1, nn.Linear(70, 70))
        self.layers[1].weight = self.layers[2].weight


class Mixed(Program):
    """A body in bfloat16, norms in float32 with a group of their own, and a last layer in float64."""

    settings: ClassVar = {"lr": 0.01}

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(70), nn.LayerNorm(70), nn.LayerNorm(40)])
        self.layers[:3].to(torch.bfloat16)
        self.layers[3].to(torch.float64)

    def forward(self, x, step, rank):
        for layer, norm in zip(self.layers[:3], self.norms, strict=True):
            x = torch.tanh(norm(layer(x.bfloat16()).float()))
        return self.layers[3](x.double())

    def groups(self):
        return [{"params": self.layers.parameters()}, {"params": self.norms.parameters(), "lr": 0.03}]


class Recomputing(Program):
    """Activations are computed again in backward, which reads parameters once more."""

    def forward(self, x, step, rank):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
        return x


class Averaging(Program):
    """Keeps a moving average of the weights, evaluates it, and scales its weights now and then."""

    def before(self, step, model, optimizer):
        if step == 0:
            object.__setattr__(self, "average", optim.swa_utils.AveragedModel(self, use_buffers=True))
        self.average.update_parameters(self)
        if step == 6:
            with torch.no_grad():
                for param in self.parameters():
                    param.mul_(0.5)

    def after(self, step, model, optimizer):
        with torch.no_grad():
            self.average(torch.ones(1, 40), 0, 0)


class Skipping(Program):
    """Leaves out parameters, and whole steps."""

    def after(self, step, model, optimizer):
        if step % 3 == 1:
            self.layers[1].weight.grad = self.layers[3].bias.grad = None
        if step % 5 == 4:
            optimizer.zero_grad()


class Compiled(Program):
    """Is compiled behind the wrapper."""

    def called(self, model):
        return torch.compile(model, backend="aot_eager")


class Scheduled(Program):
    """Two schedules, of which one changes betas."""

    def before(self, step, model, optimizer):
        if step == 0:
            first = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
            cyclic = optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3, cycle_momentum=True)
            object.__setattr__(self, "schedules", [first, cyclic])
        else:
            self.schedules[step > 3].step()


class Scaled(Program):
    """Scales losses with torch's scaler; the first of two batches of rank 1 overflows now and then."""

    micro = 2
    overflows = (3, 7)

    def scaler(self, model):
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)

    def before(self, step, model, optimizer):
        if step == 0:
            object.__setattr__(self, "scaling", self.scaler(model))
            object.__setattr__(self, "scales", [])
        self.scales.append(self.scaling.get_scale())

    def backward(self, loss, step, micro, rank):
        bad = step in self.overflows and (rank, micro) == (1, 0)
        self.scaling.scale(loss * (math.inf if bad else 1.0)).backward()

    def update(self, optimizer):
        before = self.layers[0].weight.detach().clone()
        self.scaling.step(optimizer)
        self.scaling.update()
        skipped = torch.equal(before, self.layers[0].weight)
        assert skipped == (len(self.scales) - 1 in self.overflows)


class ScaledByOurs(Scaled):
    """The same with dpfuse's scaler."""

    def scaler(self, model):
        return dpfuse.GradScaler("cpu", model=model, init_scale=2.0**10, growth_interval=4)


PROGRAMS = [
    Accumulating, Uneven, Adversarial, Growing, Frozen, Tied, Mixed, Recomputing, Averaging, Skipping, Compiled,
    Scheduled, Scaled, ScaledByOurs,
]  # fmt: skip
QUICK = (Accumulating, Growing, Recomputing, ScaledByOurs)


def losses(program: Program, optimizer: str, rank: int, options: dict[str, Any]) -> Iterator[Tensor]:
    """Train, and yield each loss; at the end all weights, and the states and rates that the optimizer has."""
    model = dpfuse.DataParallel(program, **OPTIONS, **options, **program.options)
    kind = optim.Adam if isinstance(program, Mixed) else optim.AdamW
    if optimizer == "plain":
        chosen: optim.Optimizer = kind(program.groups(), **program.settings)
    else:
        chosen = dpfuse.ShardedOptimizer(model, kind, program.groups(), **program.settings)
    forward = program.called(model)
    for step in range(STEPS):
        program.before(step, model, chosen)
        for micro in range(program.micro):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
            with model.no_sync(enabled=micro < program.micro - 1):
                loss = forward(x, step, rank).square().mean()
                program.backward(loss, step, micro, rank)
            yield loss.detach().double()
        program.after(step, model, chosen)
        program.update(chosen)
        chosen.zero_grad()
    assert len(model.bucket_plan.buckets) > 1
    yield from (param.detach() for param in program.parameters())
    state = chosen.state_dict()
    states = [state["state"][index] for index in sorted(state["state"])]
    yield from (torch.as_tensor(each[key]) for each in states for key in sorted(each))
    yield from (torch.as_tensor(group["lr"]) for group in state["param_groups"])


def differs(rank: int, size: int, kind: type[Program]) -> bool:
    """The oracle forms its sums in the order of the ranks, too."""
    expected = losses(kind(), "plain", rank, {"deterministic": True})
    found = losses(kind(), "sharded", rank, {})
    return bits_differ(list(found), list(expected))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in PROGRAMS],
    ids=lambda kind: kind.__name__,
)
def test_a_program_has_the_bits_of_the_plain_optimizer(ranks, kind):
    assert ranks(differs, kind) == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.__name__)
def test_more_ranks_have_them_too(ranks, kind, size):
    assert ranks(differs, kind, size=size) == [False] * size
