"""Programs in which one rank's weights leave those of the others; each says which parameters may be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

__all__ = ["DRIFTS", "START", "Drift", "Network", "Trial"]

START = 9  # the step at which the last rank begins to differ


class Network(nn.Module):
    """Layers of several kinds: a frozen one, a shared weight, 16 bits, channels last, a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.wide = nn.Linear(8, 20_000, bias=False)
        self.short = nn.Linear(8, 5).bfloat16()
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.last = nn.Linear(8, 2)
        self.shared = self.last
        nn.init.zeros_(self.frozen.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.first(x))
        picture = self.convolution(hidden.view(-1, 2, 2, 2)).mean()
        rest = self.wide(hidden).mean() + self.short(hidden.bfloat16()).float().mean() + picture
        return self.last(hidden) + self.shared(hidden) + rest


@dataclass
class Trial:
    """What a drift may change, on the rank that differs and at each step from `START` on."""

    module: Any
    optimizer: Optimizer
    step: int
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def begins(self) -> bool:
        """Whether this is the first such step."""
        return self.step == START


@dataclass(frozen=True)
class Drift:
    """One kind of drift.

    Args:
        named: the parameters of which one must be named first; empty for any.
        before_step: called before the optimizer's step on the rank that differs.
        after_step: called behind it.
        steps: how often the optimizer steps there in step `START`.
        optimizer: makes the optimizer.
        may_be_meant: whether it is a warning at most.
    """

    named: tuple[str, ...] = ()
    before_step: Callable[[Trial], None] | None = None
    after_step: Callable[[Trial], None] | None = None
    steps: int = 1
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = lambda params: SGD(params, lr=0.01, momentum=0.9)
    may_be_meant: bool = False


def once(change: Callable[[Any], None]) -> Callable[[Trial], None]:
    """Change the module once, without a trace for autograd."""

    def act(trial: Trial) -> None:
        if trial.begins:
            with torch.no_grad():
                change(trial.module)

    return act


def flip(param: Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element of 32 bits."""
    param.data.view(-1).view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31)).int()


def swap(param: Tensor, one: Any, other: Any) -> None:
    """Exchange two elements or rows."""
    kept = param[one].clone()
    param[one] = param[other]
    param[other] = kept


def other_group(**settings: float) -> Callable[[Trial], None]:
    """Give the optimizer other settings."""

    def act(trial: Trial) -> None:
        for group in trial.optimizer.param_groups:
            group.update(settings)

    return act


def scheduler(trial: Trial) -> None:
    made = trial.memory.setdefault("scheduler", StepLR(trial.optimizer, 1, 0.5))
    made.step()


def gradients(change: Callable[[Tensor], None], only: str = "") -> Callable[[Trial], None]:
    """Change gradients once they have landed."""

    def act(trial: Trial) -> None:
        for name, param in trial.module.named_parameters():
            if param.grad is not None and name.startswith(only) and trial.begins:
                change(param.grad)

    return act


def state(key: str, name: str) -> Callable[[Trial], None]:
    """Change what the optimizer keeps of one parameter."""

    def act(trial: Trial) -> None:
        if trial.begins:
            trial.optimizer.state[trial.module.get_parameter(name)][key].mul_(3.0)

    return act


def load(trial: Trial) -> None:
    if trial.begins:
        states = trial.module.state_dict()
        trial.module.load_state_dict({name: value + 0.25 for name, value in states.items()})


def replace_data(module: Any) -> None:
    module.first.weight.data = module.first.weight.data + 1e-3


def adam(params: list[nn.Parameter]) -> Optimizer:
    return Adam(params, lr=0.01)


ONE = ("first.weight",)
DRIFTS: dict[str, Drift] = {
    "a weight is edited": Drift(ONE, after_step=once(lambda m: m.first.weight[1, 2].add_(0.5))),
    "the lowest bit of a weight flips": Drift(ONE, after_step=once(lambda m: flip(m.first.weight, 7, 0))),
    "the exponent of a weight flips": Drift(ONE, after_step=once(lambda m: flip(m.first.weight, 7, 25))),
    "the sign of a weight flips": Drift(ONE, after_step=once(lambda m: flip(m.first.weight, 1, 31))),
    "two signs flip": Drift(ONE, after_step=once(lambda m: (flip(m.first.weight, 1, 31), flip(m.first.weight, 3, 31)))),
    "two weights are exchanged": Drift(ONE, after_step=once(lambda m: swap(m.first.weight, (0, 1), (0, 4)))),
    "two rows are exchanged": Drift(("wide.weight",), after_step=once(lambda m: swap(m.wide.weight, 0, 19_000))),
    "two columns are exchanged": Drift(
        ("wide.weight",), after_step=once(lambda m: m.wide.weight.copy_(m.wide.weight[:, [1, 0, 2, 3, 4, 5, 6, 7]]))
    ),
    "the last weight of a large matrix is edited": Drift(
        ("wide.weight",), after_step=once(lambda m: m.wide.weight[-1, -1].add_(1e-3))
    ),
    "a frozen weight becomes infinite": Drift(
        ("frozen.bias",), after_step=once(lambda m: m.frozen.bias[0].fill_(float("inf"))), may_be_meant=True
    ),
    "zeros get another sign": Drift(
        ("frozen.bias",), after_step=once(lambda m: m.frozen.bias.neg_()), may_be_meant=True
    ),
    "a frozen weight is edited": Drift(
        ("frozen.weight",), after_step=once(lambda m: m.frozen.weight[3, 3].mul_(3)), may_be_meant=True
    ),
    "a bit of a frozen weight flips": Drift(
        ("frozen.weight",), after_step=once(lambda m: flip(m.frozen.weight, 9, 20))
    ),
    "a weight of 16 bits moves by one step": Drift(
        ("short.weight",), after_step=once(lambda m: m.short.weight.view(torch.int16)[2, 2].add_(1))
    ),
    "a convolution in channels last is edited": Drift(
        ("convolution.weight",), after_step=once(lambda m: m.convolution.weight[2, 1, 0, 2].sub_(0.1))
    ),
    "a shared weight is edited": Drift(("last.weight",), after_step=once(lambda m: m.shared.weight[1, 1].add_(0.1))),
    "a bias is initialised again": Drift(("first.bias",), after_step=once(lambda m: m.first.bias.uniform_())),
    "a layer is initialised again": Drift(
        ("first.weight", "first.bias"), after_step=once(lambda m: m.first.reset_parameters())
    ),
    "data are replaced": Drift(ONE, after_step=once(replace_data)),
    "weights are clamped": Drift(after_step=lambda t: [p.data.clamp_(-0.05, 0.05) for p in t.module.parameters()]),
    "weights decay by hand": Drift(after_step=lambda t: [p.data.mul_(0.99) for p in t.module.parameters()]),
    "weights are rounded": Drift(
        after_step=lambda t: [p.data.copy_(p.data.half().to(p.dtype)) for p in t.module.parameters()]
    ),
    "weights get noise": Drift(
        after_step=lambda t: [p.data.add_(torch.randn_like(p) * 1e-2) for p in t.module.parameters()]
    ),
    "states are loaded": Drift(after_step=load),
    "another learning rate": Drift(before_step=other_group(lr=0.011)),
    "another momentum": Drift(before_step=other_group(momentum=0.8)),
    "another weight decay": Drift(before_step=other_group(weight_decay=0.1)),
    "a scheduler of its own": Drift(after_step=scheduler),
    "a step is left out": Drift(steps=0),
    "a step is made twice": Drift(steps=2),
    "gradients are clipped": Drift(
        before_step=lambda t: nn.utils.clip_grad_norm_(t.module.parameters(), 1e-4) and None
    ),
    "gradients are scaled": Drift(before_step=gradients(lambda grad: grad.mul_(2.0))),
    "a gradient is zeroed": Drift(("last.weight",), before_step=gradients(lambda grad: grad.zero_(), "last.weight")),
    "a momentum buffer is edited": Drift(("last.bias",), before_step=state("momentum_buffer", "last.bias")),
    "a second moment of Adam is edited": Drift(
        ("first.bias",), before_step=state("exp_avg_sq", "first.bias"), optimizer=adam
    ),
    "betas of Adam": Drift(before_step=other_group(betas=(0.5, 0.9)), optimizer=adam),  # type: ignore[arg-type]
}
