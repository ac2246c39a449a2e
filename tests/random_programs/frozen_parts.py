"""Programs whose parts are frozen and unfrozen inside a window, beside what acts on gradients after the mean.

The rule: a backward that synchronises adds to each parameter the mean over the ranks of what they have accumulated for
it since the last one. What a parameter has had before stays as it is, whether it is frozen, unused or neither. With
weights the mean is weighted. A loss scale is torch's: its `GradScaler` acts on the plain module.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from tests.random_programs.agreement import agree_on, what_is_wrong

__all__ = ["FrozenParts"]

WEIGHTS = {"window": 6.0, "freeze_or_unfreeze": 1.0, "window_with_an_overflow": 1.0, "evaluate": 0.5}
LARGE = 1e6  # a gradient with which a program ends


class Net(nn.Module):
    """A trunk, and parts that a forward may use or not; the trunk may be detached, as for a loss of the parts alone."""

    def __init__(self, shared: random.Random) -> None:
        super().__init__()
        width = shared.choice([3, 6])
        self.trunk = nn.Linear(4, width)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, shared.choice([2, 5])), nn.Tanh()) for _ in range(shared.randint(2, 4))
        )
        self.double()

    def forward(self, x: Tensor, use: Sequence[int], detached: bool = False) -> Tensor:
        hidden = self.trunk(x).tanh()
        hidden = hidden.detach() if detached else hidden
        return torch.cat([self.parts[index](hidden) for index in use], dim=1)

    def children_of_optimizers(self) -> list[nn.Module]:
        """Return the modules that have an optimizer each."""
        return [self.trunk, *self.parts]


class FrozenParts:
    """One program. What it does is the same on all ranks; batches, and sometimes the parts in use, are not.

    Args:
        rank, size: of this process and the default group.
        seed: of all choices.

    Attributes:
        log: what it is and what it has done, in words.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank, self.size = rank, size
        self.log: list[str] = []
        self._shared, self._own = random.Random(seed), random.Random(1000 * seed + rank)
        self._batches = torch.Generator().manual_seed(77 * seed + rank)
        torch.manual_seed(seed)
        self.net = Net(self._shared)
        self.plain = copy.deepcopy(self.net)
        self._weighs = self._shared.choice(["", "", "mean", "sum"])
        self._clips = self._shared.choice(["", "", "all", "parts"])
        self._pending: dict[str, Tensor] = {}  # what this rank has accumulated for the plain module
        self._trained: set[str] = set()  # the parameters that were not frozen in some backward meanwhile
        self._may_be_given: set[str] = set()  # those of the last mean
        self._wrap()
        self._scalers: tuple[Any, Any] | None = None
        if self._shared.random() < 0.5:
            scale = 2.0 ** self._shared.randint(1, 12)
            ours = dpfuse.GradScaler("cpu", init_scale=scale, growth_interval=3, model=self.model)
            self._scalers = ours, torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        kind, settings = self._shared.choice([(torch.optim.SGD, {"lr": 0.05}), (torch.optim.Adam, {"eps": 1e-6})])
        self._optimizers = [
            [kind(child.parameters(), **settings) for child in net.children_of_optimizers()]
            for net in (self.net, self.plain)
        ]
        self.log.append(f"weights {self._weighs!r}, clips {self._clips!r}, scaler {self._scalers is not None}, {kind}")

    def run(self, length: int) -> None:
        """Do so many things, and compare in and after each; raises AssertionError on every rank."""
        for number in range(length):
            name = self._shared.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            self.log.append(f"{number}: {name}")
            agree_on(what_is_wrong(partial(self._do, name)))
            largest = torch.stack([param.detach().abs().max() for param in self.plain.parameters()]).max()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            if largest > LARGE:
                return

    def _do(self, name: str) -> str:
        error: str = getattr(self, name)() or self._difference("weight")
        return error

    def _wrap(self) -> None:
        shared = self._shared
        face = shared.choice(["DataParallel", "DistributedDataParallel", "replicate"])
        views = shared.random() < 0.5
        options: dict[str, Any] = {"gradient_as_bucket_view": views, "find_unused_parameters": shared.random() < 0.3}
        self._measures = shared.random() < 0.4
        options |= {"metrics": True} if self._measures else {}
        if shared.random() < 0.5:
            size = shared.choice([1e-4, 3e-4])
            sizes = {"comm_buffer_size": size, "last_comm_buffer_size": size}
            options |= sizes if face == "DataParallel" else {"bucket_cap_mb": size}
        self.log.append(f"{face} {options}")
        self.call = getattr(dpfuse, face)(self.net, **options)
        self.model = self.call.replicated_by if face == "replicate" else self.call

    def _batch(self) -> Tensor:
        return torch.randn(3, 4, generator=self._batches, dtype=torch.float64)

    # --- The rule, by hand ---

    def _plain_backward(self, loss: Tensor) -> None:
        kept = {name: param.grad for name, param in self.plain.named_parameters()}
        self.plain.zero_grad()
        loss.backward()
        for name, param in self.plain.named_parameters():
            if param.grad is not None:
                self._pending[name] = param.grad + self._pending.get(name, 0.0)
            param.grad = kept[name]

    def _average(self, weight: float | None) -> list[str]:
        """Add the means to what the plain module has; return the names of the parameters that have got some."""
        factor = 1.0 if weight is None or self._weighs == "sum" else weight
        total = torch.tensor(1.0 if weight is None else weight, dtype=torch.float64)
        dist.all_reduce(total)
        given = []
        for name, param in self.plain.named_parameters():
            wanted = torch.tensor(float(name in self._pending))
            dist.all_reduce(wanted)
            if not wanted:
                continue
            mean = self._pending.get(name, torch.zeros_like(param)).detach() * factor
            dist.all_reduce(mean)
            param.grad = mean / total + (0.0 if param.grad is None else param.grad)
            given.append(name)
        self._pending.clear()
        self._may_be_given, self._trained = {*given, *self._trained}, set()
        return given

    def _difference(self, what: str, *, unscaled: bool = False) -> str:
        """Return how weights or gradients differ; `unscaled` tells that the plain ones carry no loss scale any more."""
        scale = 1.0 if unscaled or self._scalers is None else self._scalers[1].get_scale()
        for (name, ours), plain in zip(self.net.named_parameters(), self.plain.parameters(), strict=True):
            one, other = ours.detach(), plain.detach()
            if what == "gradient":
                one, other = (torch.zeros_like(each) if each.grad is None else each.grad for each in (ours, plain))
                other = other / scale
            if not torch.allclose(one, other, rtol=1e-6, atol=1e-8):
                return f"{what} of {name} differs: it is {one.flatten()[:4]}, expected {other.flatten()[:4]}"
        return ""

    def _measured(self, given: Sequence[str]) -> str:
        """Compare the norm that `metrics()` has with that of what the backward before has delivered."""
        if not self._measures:
            return ""
        scale = 1.0 if self._scalers is None else self._scalers[1].get_scale()
        grads = {name: param.grad for name, param in self.plain.named_parameters() if param.grad is not None}
        # What no rank has used may count as delivered, if it was not frozen all the time: its gradient stays the same.
        norms = [
            sum(grads[name].square().sum().item() for name in grads.keys() & names) ** 0.5 / scale
            for names in (given, self._may_be_given)
        ]
        found = self.model.metrics()["grad_norm"]
        if any(abs(found - norm) <= 1e-5 * norm for norm in norms):
            return ""
        return f"metrics() has the norm {found}, but what was delivered has {' or '.join(map(str, norms))}"

    # --- What it does ---

    def window(self, *, overflow: bool = False) -> str:
        """Run some backwards, of which the last one synchronises, with freezing between them; then step."""
        shared = self._shared
        count = shared.randint(1, 4)
        bad = shared.randrange(count) if overflow else -1
        weight = None
        for number in range(count):
            if number and shared.random() < 0.7:
                self.freeze_or_unfreeze()
            use, detached = self._choose_use()
            local = number < count - 1 and shared.random() < 0.4
            if weight is None and self._weighs:
                weight = float(self._own.randint(1, 6))
                self.model.set_gradient_weight(weight, reduction=self._weighs)
            factor = torch.inf if number == bad and self.rank == 0 else 1.0
            self._say(f"parts {use}{' detached' * detached}{' local' * local}{' overflow' * (number == bad)}")
            self._backward(use, detached, local, factor)
            if not local:
                given, weight = self._average(weight), None
                if not overflow and (error := self._difference("gradient") or self._measured(given)):
                    return error
        if shared.random() < 0.8:
            self._say("unfreezes all")
            for net in (self.net, self.plain):
                net.requires_grad_(True)
        error = self._step(overflow=overflow)
        # A loss scale is divided out of all gradients, so none may be left for the next window.
        kept = shared.randrange(len(self.net.parts)) if not self._scalers and shared.random() < 0.2 else -1
        to_none = shared.random() < 0.7
        for net, optimizers in zip((self.net, self.plain), self._optimizers, strict=True):
            for child, optimizer in zip(net.children_of_optimizers(), optimizers, strict=True):
                if kept < 0 or child is not net.parts[kept]:
                    optimizer.zero_grad(set_to_none=to_none)
        return error

    def window_with_an_overflow(self) -> str:
        return self.window(overflow=self._scalers is not None)

    def freeze_or_unfreeze(self) -> str:
        """The trunk always trains."""
        shared = self._shared
        places, trains = [place for place in range(len(self.net.parts)) if shared.random() < 0.5], shared.random() < 0.4
        whole = shared.random() < 0.7
        for net in (self.net, self.plain):
            for place in places:
                params = [*net.parts[place].parameters()]
                for param in params if whole else params[:1]:
                    param.requires_grad_(trains)
        self._say(f"{'un' * trains}freezes {places}{'' if whole else ', the weights'}")
        return ""

    def evaluate(self) -> str:
        with torch.no_grad():
            self.call(self._batch(), [0])
        return ""

    # --- Parts of a window ---

    def _say(self, text: str) -> None:
        self.log[-1] += f"; {text}"

    def _choose_use(self) -> tuple[list[int], bool]:
        """Return the parts in use, and whether the trunk is detached: then all ranks use the same, and one trains."""
        same = self._shared.random() < 0.7
        chance = self._shared if same else self._own
        use = [place for place in range(len(self.net.parts)) if chance.random() < 0.6] or [0]
        trains = any(param.requires_grad for place in use for param in self.net.parts[place].parameters())
        return use, self._shared.random() < 0.4 and same and trains

    def _backward(self, use: Sequence[int], detached: bool, local: bool, factor: float) -> None:
        x = self._batch()
        self._trained |= {name for name, param in self.plain.named_parameters() if param.requires_grad}
        ours, plain = self._scalers or (None, None)
        loss = self.plain(x, use, detached).square().sum() * factor
        self._plain_backward(loss if plain is None else plain.scale(loss))
        with self.model.no_sync(enabled=local):
            loss = self.call(x, use, detached).square().sum() * factor
            (loss if ours is None else ours.scale(loss)).backward()

    def _step(self, *, overflow: bool) -> str:
        pairs = [*zip(*self._optimizers, strict=True)]
        if self._scalers is not None:
            for pair in pairs:
                for scaler, optimizer in zip(self._scalers, pair, strict=True):
                    if self._has_gradients(optimizer):
                        scaler.unscale_(optimizer)
        if not overflow and (error := self._difference("gradient", unscaled=True) or self._clip()):
            return error
        before = [
            [param.detach().clone() for param in child.parameters()] for child in self.net.children_of_optimizers()
        ]
        for pair in pairs:
            for scaler, optimizer in zip(self._scalers or (None, None), pair, strict=True):
                if scaler is None:
                    optimizer.step()
                elif self._has_gradients(optimizer):  # else torch's scaler has nothing to look at
                    scaler.step(optimizer)
        if self._scalers is None:
            return ""
        if overflow:
            self._follow_skipped(before)
        if any(map(self._has_gradients, self._optimizers[0])):
            for scaler in self._scalers:
                scaler.update()
        ours, plain = (scaler.get_scale() for scaler in self._scalers)
        return "" if ours == plain else f"the loss scale is {ours}, expected {plain}"

    @staticmethod
    def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
        return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])

    def _follow_skipped(self, before: Sequence[Sequence[Tensor]]) -> None:
        """Let the plain module have what ours has skipped: it may skip the steps of all optimizers of a model.

        torch's scaler looks at the gradients of each optimizer by itself.
        """
        children = zip(self.net.children_of_optimizers(), self.plain.children_of_optimizers(), strict=True)
        for (ours, plain), old, pair in zip(children, before, zip(*self._optimizers, strict=True), strict=True):
            skipped = all(map(torch.equal, ours.parameters(), old))
            if skipped and not all(map(torch.equal, plain.parameters(), old)):
                plain.load_state_dict(ours.state_dict())
                pair[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))
                self._say("skips what torch's scaler does not")

    def _clip(self) -> str:
        if not self._clips:
            return ""
        if self._clips == "parts":
            for net in (self.net, self.plain):
                for part in net.parts:
                    nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            return ""
        ours, plain = self.model.clip_grad_norm_(0.3), nn.utils.clip_grad_norm_(self.plain.parameters(), 0.3)
        close = torch.allclose(ours.double(), plain, rtol=1e-6)
        return "" if close else f"the norm is {ours}, expected {plain}"
