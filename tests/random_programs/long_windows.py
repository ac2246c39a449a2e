"""Programs with windows of 60 to 130 micro-batches, and more on some ranks. Gradients are averaged by hand beside.

With weights, ranks may differ in the length of a window. Without, every rank raises in the backward that ends it.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from tests.random_programs.agreement import agree_on, what_is_wrong

__all__ = ["LongWindows"]

EDGES = [63, 64, 65, 127, 128, 129]
BEYOND = [1, 2, 62, 64, 128]  # how many more there are on some ranks
LENGTH = 3  # windows of a program


class LongWindows:
    """One program. What it does is the same on all ranks, but for the lengths of windows; batches are not.

    Args:
        rank, size: of this process and the default group.
        seed: of all choices.

    Attributes:
        log: what it is and what it has done, in words.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank, self.size = rank, size
        self._shared = shared = random.Random(seed)
        self._batches = torch.Generator().manual_seed(77 * seed + rank)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.plain = copy.deepcopy(self.net)
        face = shared.choice(["DataParallel", "DistributedDataParallel"])
        options: dict[str, Any] = {"gradient_as_bucket_view": shared.random() < 0.5}
        for option in ("find_unused_parameters", "accumulate_in_buckets"):
            if shared.random() < 0.25:
                options[option] = True
        self.model: Any = getattr(dpfuse, face)(self.net, **options)
        self._optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.net, self.plain)]
        self.log = [f"{face} {options}"]

    def run(self, length: int) -> None:
        """Train; raises AssertionError on every rank. `length` is for shorter things, and makes no difference."""
        for number in range(LENGTH):
            self.log.append(f"{number}:")
            agree_on(what_is_wrong(partial(self._window, self._shared.choice(["equal", "weights", "differing"]))))

    def _counts(self, kind: str) -> list[int]:
        shared = self._shared
        count = shared.choice([shared.randint(60, 130), shared.choice(EDGES)])
        if kind == "equal":
            return [count] * self.size
        more = shared.choice([shared.randint(1, 70), shared.choice(BEYOND)])
        if shared.random() < 0.2:
            count = 1
        return [count + more * (rank % 2 == shared.randint(0, 1)) for rank in range(self.size)]

    def _window(self, kind: str) -> str:
        counts = self._counts(kind)
        kind = "equal" if len(set(counts)) == 1 and kind == "differing" else kind
        self.log[-1] += f" {kind}, {counts}"
        count = counts[self.rank]
        if kind == "weights":
            self.model.set_gradient_weight(count, reduction="sum")
        batches = [torch.randn(2, 3, generator=self._batches, dtype=torch.float64) for _ in range(count)]
        try:
            for number, x in enumerate(batches):
                with self.model.no_sync(enabled=number < count - 1):
                    self._loss(self.model, x).backward()
        except dpfuse.DPFuseError as error:
            self.model.zero_grad()
            return "" if kind == "differing" else f"DPFuseError: {error}"
        if kind == "differing":
            return "no error was raised"
        for x in batches:
            self._loss(self.plain, x).backward()
        total = sum(counts) if kind == "weights" else self.size
        for (name, ours), plain in zip(self.net.named_parameters(), self.plain.parameters(), strict=True):
            assert plain.grad is not None
            dist.all_reduce(plain.grad)
            plain.grad /= total
            if ours.grad is None or not torch.allclose(ours.grad, plain.grad, rtol=1e-6, atol=1e-9):
                return f"gradient of {name} is {ours.grad}, expected {plain.grad}"
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return ""

    @staticmethod
    def _loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().sum()
