"""Programs made at random with two or three wrapped models, which are used one behind another in one backward.

The rule is that of `program`, for each model by itself. A model has a part in a backward if the loss depends on outputs
of it that need gradients.
"""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from tests.random_programs.agreement import agree_on, what_is_wrong
from tests.random_programs.by_hand import average, changed, gradients_of

__all__ = ["SeveralModels"]

WEIGHTS = {"train": 8.0, "step": 5.0, "zero": 2.0, "zero_all": 2.0, "evaluate": 1.0, "evaluate_on_one_rank": 1.0}


class Net(nn.Module):
    """Takes and returns four numbers for each row; a part of it may be left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.side = nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(width, 4)
        self.double()

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden) + self.side(hidden) if side else self.second(hidden)


class SeveralModels:
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
        self.nets = [Net(self._shared.choice([3, 6])) for _ in range(self._shared.choice([2, 2, 3]))]
        self.plain = [copy.deepcopy(net) for net in self.nets]
        wrapped = [self._wrapped(net) for net in self.nets]
        self.models, self.calls = [model for model, _ in wrapped], [call for _, call in wrapped]
        self._optimizers = [
            [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
            for nets in (self.nets, self.plain)
        ]
        self._accumulated: list[set[str]] = [set() for _ in self.nets]
        self._owes = [False for _ in self.nets]

    def run(self, length: int) -> None:
        """Do so many things, and compare after each; raises AssertionError on every rank."""
        for number in range(length):
            name = self._shared.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            self.log.append(f"{number}: {name}")
            agree_on(what_is_wrong(partial(self._do, name)))

    def _do(self, name: str) -> str:
        self.log[-1] += f" {getattr(self, name)()}"
        return self._difference()

    def _wrapped(self, net: Net) -> tuple[Any, Any]:
        shared = self._shared
        face = shared.choice(["DataParallel", "DistributedDataParallel", "replicate"])
        options: dict[str, Any] = {"check_training": shared.choice(["raise", "log", "off"])}
        for option in ("find_unused_parameters", "deterministic", "metrics"):
            if shared.random() < 0.25:
                options[option] = True
        small = shared.random() < 0.4
        if face == "DataParallel":
            options |= {"comm_buffer_size": 1e-4, "last_comm_buffer_size": 1e-4} if small else {}
        else:
            options |= {"bucket_cap_mb": 1e-4} if small else {}
            options["gradient_as_bucket_view"] = shared.random() < 0.5
        self.log.append(f"{face} {options}")
        call = getattr(dpfuse, face)(net, **options)
        return call.replicated_by if face == "replicate" else call, call

    def _batch(self) -> Tensor:
        return torch.randn(3, 4, generator=self._batches, dtype=torch.float64)

    def _average(self, index: int) -> None:
        average(dict(self.plain[index].named_parameters()), self._accumulated[index])
        self._accumulated[index].clear()
        self._owes[index] = False

    def _plain_backward(self, loss: Tensor) -> None:
        params = [dict(net.named_parameters()) for net in self.plain]
        before = [gradients_of(each) for each in params]
        loss.backward()
        for names, each, old in zip(self._accumulated, params, before, strict=True):
            names |= changed(each, old)

    def _difference(self) -> str:
        for index, (net, plain) in enumerate(zip(self.nets, self.plain, strict=True)):
            for (name, here), there in zip(net.named_parameters(), plain.parameters(), strict=True):
                if not torch.allclose(here, there, rtol=1e-8, atol=1e-8):
                    return f"weight {name} of model {index} differs by {(here - there).abs().max()}"
                one, other = (torch.zeros_like(each) if each.grad is None else each.grad for each in (here, there))
                if not torch.allclose(one, other, rtol=1e-8, atol=1e-8):
                    return f"gradient of {name} of model {index} differs by {(one - other).abs().max()}"
        return ""

    # --- What it does ---

    def train(self) -> str:
        shared = self._shared
        chain = shared.sample(range(len(self.nets)), shared.randint(1, len(self.nets)))
        if shared.random() < 0.2:
            chain.append(chain[0])
        inside = sorted(set(chain))
        frozen, local = ([index for index in inside if shared.random() < 0.25] for _ in range(2))
        if len(frozen) == len(inside):
            return "nothing: all are frozen"
        cut = shared.choice([None, None, 0, 1])  # behind which place of the chain the graph ends
        # Where a model comes twice and ranks use it differently, its gradients are ready in another order. That cannot
        # be told apart from another order of the models.
        same = shared.random() < 0.6 or len(inside) < len(chain)
        sides = [(shared if same else self._own).random() < 0.6 for _ in chain]
        each_counts = shared.random() < 0.3  # in the loss, and not only the last one
        x = self._batch()

        def run(calls: list[Any]) -> tuple[Tensor, list[bool]]:
            hidden, loss, needing = x, torch.zeros((), dtype=torch.float64), []
            for place, (index, side) in enumerate(zip(chain, sides, strict=True)):
                hidden = calls[index](hidden, side)
                needing.append(hidden.requires_grad)
                loss = loss + hidden.square().mean() if each_counts else loss
                hidden = hidden.detach() if place == cut else hidden
            return loss + hidden.square().sum(), needing

        self._let_train(frozen, trains=False)
        plain, needing = run(self.plain)
        if plain.requires_grad:
            self._plain_backward(plain)
            with ExitStack() as contexts:
                for index in local:
                    contexts.enter_context(self.models[index].no_sync())
                run(self.calls)[0].backward()
            last = len(chain) - 1
            reached = {
                index
                for place, index in enumerate(chain)
                if needing[place] and (each_counts or cut is None or cut < place or cut > last)
            }
            for index in inside:
                if index in reached and (index not in local or self._owes[index]):
                    self._average(index)
                elif index not in reached and index not in local:
                    self._owes[index] = True
        self._let_train(frozen, trains=True)
        return f"chain {chain}, frozen {frozen}, local {local}, cut {cut}, sides {sides}, each counts: {each_counts}"

    def _let_train(self, frozen: list[int], *, trains: bool) -> None:
        for index in frozen:
            for net in (self.nets[index], self.plain[index]):
                net.requires_grad_(trains)

    def step(self) -> str:
        index = self._shared.randrange(len(self.nets))
        waiting = torch.tensor(float(len(self._accumulated[index])))
        dist.all_reduce(waiting)
        if waiting:
            return "not now"
        for optimizers in self._optimizers:
            optimizers[index].step()
        return f"model {index}"

    def zero(self) -> str:
        index, to_none = self._shared.randrange(len(self.nets)), self._shared.random() < 0.6
        for optimizers in self._optimizers:
            optimizers[index].zero_grad(set_to_none=to_none)
        self._accumulated[index].clear()
        return f"model {index}, to None: {to_none}"

    def zero_all(self) -> str:
        for optimizer in (*self._optimizers[0], *self._optimizers[1]):
            optimizer.zero_grad()
        for names in self._accumulated:
            names.clear()
        return ""

    def evaluate(self) -> str:
        index = self._shared.randrange(len(self.nets))
        with torch.no_grad():
            self.calls[index](self._batch())
        return f"model {index}"

    def evaluate_on_one_rank(self) -> str:
        index, rank = self._shared.randrange(len(self.nets)), self._shared.randrange(self.size)
        if rank == self.rank:
            with torch.no_grad():
                self.calls[index](torch.ones(2, 4, dtype=torch.float64))
        return f"model {index}, rank {rank}"
