"""Programs in which other tensors share the memory of a module's buffers. torch's class trains the same program beside.

Its buffers are written in place, so whoever has a part of their memory reads what rank 0 had.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dpfuse
from tests.random_programs.agreement import agree_on, what_is_wrong

__all__ = ["SharedBuffers"]

WEIGHTS = {
    "train": 6.0,
    "train_in_a_window": 2.0,
    "write": 3.0,
    "write_by_a_sharer": 1.5,
    "share": 2.0,
    "stop_to_share": 1.0,
    "evaluate": 1.0,
    "load": 0.7,
}
WIDTH = 3


class Net(nn.Module):
    """Subtracts one buffer and multiplies with another one; a forward that trains may write to both."""

    def __init__(self, shared: random.Random) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if shared.random() < 0.3 else nn.Identity()
        self.child = nn.Module()
        self.child.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.ones(4, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.writes = shared.random() < 0.5
        self.saves = shared.random() < 0.4  # whether a graph saves a buffer
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.layer(x)) - self.child.center
        if self.saves:
            hidden = hidden * self.queue[0]
        if self.training and self.writes:
            with torch.no_grad():
                self.child.center.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
                self.seen += len(x)
        return hidden


class Loss(nn.Module):
    """Has a part of another module's buffer among its own."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self.register_buffer("part", part)


# What shares the memory of a buffer; each gets the module, the name of the buffer, and the buffer.
SHARING: dict[str, Callable[[nn.Module, str, Tensor], Tensor]] = {
    "itself": lambda net, name, buffer: buffer,
    "detach": lambda net, name, buffer: buffer.detach(),
    "data": lambda net, name, buffer: buffer.data,
    "view": lambda net, name, buffer: buffer.view(-1, WIDTH),
    "row": lambda net, name, buffer: buffer.view(-1, WIDTH)[-1],
    "part": lambda net, name, buffer: buffer[..., 1:],
    "state_dict": lambda net, name, buffer: net.state_dict()[name],
    "numpy": lambda net, name, buffer: torch.from_numpy(buffer.numpy()),
    "loss module": lambda net, name, buffer: Loss(buffer.view(-1, WIDTH)[0]).part,
}


class SharedBuffers:
    """One program. What it does is the same on all ranks; batches are not.

    Args:
        rank, size: of this process and the default group.
        seed: of all choices.

    Attributes:
        log: what it is and what it has done, in words.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.log: list[str] = []
        self._shared = random.Random(seed)
        self._batches = torch.Generator().manual_seed(77 * seed + rank)
        torch.manual_seed(seed)
        nets = [net := Net(self._shared), copy.deepcopy(net)]
        face = self._shared.choice(["DataParallel", "DistributedDataParallel", "DistributedDataParallel"])
        options: dict[str, Any] = {"gradient_as_bucket_view": self._shared.random() < 0.5}
        more = {"broadcast_buffers": True} if face == "DataParallel" else {}
        self.log.append(f"{face} {options}, writes {net.writes}, saves {net.saves}\n{net}")
        self._sharers: list[tuple[str, list[Tensor]]] = []  # by a name, of both modules
        self._nets = nets
        for _ in range(self._shared.randint(0, 2)):
            self.share()  # before wrapping
        self._models = [
            getattr(dpfuse, face)(nets[0], **options, **more),
            nn.parallel.DistributedDataParallel(nets[1], **options),
        ]
        self._optimizers = [torch.optim.SGD(net.parameters(), lr=0.02) for net in nets]

    def run(self, length: int) -> None:
        """Do so many things, and compare in and after each; raises AssertionError on every rank."""
        for number in range(length):
            name = self._shared.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            self.log.append(f"{number}: {name}")
            agree_on(what_is_wrong(partial(self._do, name)))

    def _do(self, name: str) -> str:
        error: str = getattr(self, name)()
        return error or self._torn()

    def _torn(self) -> str:
        """Return which tensor shares its memory with a buffer under torch's class, and not under ours."""
        for what, (ours, torchs) in self._sharers:
            buffers = [{tensor.untyped_storage().data_ptr() for tensor in net.buffers()} for net in self._nets]
            shares = [
                each.untyped_storage().data_ptr() in there for each, there in zip((ours, torchs), buffers, strict=True)
            ]
            if shares == [False, True]:
                return f"{what} shares the memory of no buffer any more"
        return ""

    def _batch(self) -> Tensor:
        return torch.randn(4, WIDTH, generator=self._batches, dtype=torch.float64)

    def _loss(self, side: int, out: Tensor) -> Tensor:
        loss = out.square().mean()
        for place, (_, tensors) in enumerate(self._sharers):
            part = tensors[side].reshape(-1)[:2]
            loss = loss + ((out[:, :2] - part) ** 2).mean() if place % 2 else loss + (out[:, :2] * part).mean()
        return loss

    def _backward(self, *, sync: bool = True) -> str:
        x, losses = self._batch(), []
        for side, model in enumerate(self._models):
            if sync:
                loss = self._loss(side, model(x))
                loss.backward()
            else:
                with model.no_sync():
                    loss = self._loss(side, model(x))
                    loss.backward()
            losses.append(loss.item())
        # Buffers arrive when a backward ends, and under torch's class when the next forward begins: losses tell more.
        if abs(losses[0] - losses[1]) > 1e-9 * max(1.0, abs(losses[1])):
            return f"the loss is {losses[0]}, and {losses[1]} with torch's class"
        return ""

    def _difference(self) -> str:
        for (name, ours), theirs in zip(self._nets[0].named_parameters(), self._nets[1].parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            for what, one, other in (("weight", ours, theirs), ("gradient", ours.grad, theirs.grad)):
                if not torch.allclose(one, other, rtol=1e-9, atol=1e-10):
                    return f"{what} of {name} differs by {(one - other).abs().max()}"
        return ""

    # --- What it does ---

    def train(self) -> str:
        error = self._backward() or self._difference()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return error

    def train_in_a_window(self) -> str:
        if isinstance(self._nets[0].norm, nn.BatchNorm1d) or self._nets[0].writes:
            return ""  # inside no_sync() torch's class sends at other times, so that ranks read other buffers
        errors = [self._backward(sync=False) for _ in range(self._shared.randint(1, 2))]
        return next(filter(None, errors), "") or self.train()

    def write(self) -> str:
        """All ranks write the same, as a loop does for a center or a queue."""
        name, value = self._shared.choice(["child.center", "queue"]), self._shared.random()
        how = self._shared.choice(["add_", "fill_", "row"])
        for net in self._nets:
            buffer = net.get_buffer(name)
            if how == "row":
                buffer.view(-1, WIDTH)[0] = value
            else:
                getattr(buffer, how)(value)
        self.log[-1] += f" {name} {how}"
        return ""

    def write_by_a_sharer(self) -> str:
        for what, tensors in self._sharers[:1]:
            for tensor in tensors:
                tensor.add_(0.25)
            self.log[-1] += f" {what}"
        return ""

    def share(self) -> str:
        how, name = self._shared.choice([*SHARING]), self._shared.choice(["child.center", "queue"])
        self._sharers.append(
            (f"{how} of {name}", [SHARING[how](net, name, net.get_buffer(name)) for net in self._nets])
        )
        self.log[-1] += f" {how} of {name}"
        return ""

    def stop_to_share(self) -> str:
        if self._sharers:
            self._sharers.pop(self._shared.randrange(len(self._sharers)))
        return ""

    def evaluate(self) -> str:
        x = self._batch()
        for model in self._models:
            model.eval()
        with torch.no_grad():
            outs = [model(x) for model in self._models]
        for model in self._models:
            model.train()
        return "" if torch.allclose(*outs) else f"an output is {outs[0][0]}, and {outs[1][0]} with torch's class"

    def load(self) -> str:
        factor = self._shared.choice([0.5, 0.9])
        for net in self._nets:
            state = {
                key: value * factor if value.is_floating_point() else value for key, value in net.state_dict().items()
            }
            net.load_state_dict(state)
        return ""
