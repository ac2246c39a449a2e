"""What a program of a fault is given: a rank, a wrapper, training steps, and a file to tell what it sees."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse

__all__ = ["DDP", "FACES", "IN_BACKWARD", "SHARDED", "TORCH", "WIDTH", "Job", "Net", "Run", "plain_loss"]

WIDTH = 64
RATE = 0.01
BUCKET_MB = 0.017  # about one layer of Net: a model of several buckets
DDP = "DDP"
# torch's wrapper as it is, and with each argument that can help it.
TORCH: dict[str, Callable[..., nn.Module]] = {
    DDP: DistributedDataParallel,
    "DDP, find_unused_parameters": partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP, static_graph": partial(DistributedDataParallel, static_graph=True),
}
SHARDED = "sharded"  # as DataParallel, and each rank keeps one part of the optimizer
IN_BACKWARD = "in_backward"  # likewise, and updates it while backward runs
FACES: dict[str, Callable[..., nn.Module]] = {
    "dpfuse": dpfuse.DistributedDataParallel,
    "DataParallel": dpfuse.DataParallel,
    SHARDED: dpfuse.DataParallel,
    IN_BACKWARD: dpfuse.DataParallel,
    **TORCH,
}

Run = Callable[[nn.Module, Tensor, int], Tensor]  # a model, a batch, and the rank whose it is: the loss


class Net(nn.Module):
    """A few equal layers; those in `skip` are left out of a forward."""

    def __init__(self, depth: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(depth))

    def forward(self, x: Tensor, skip: Iterable[int] = ()) -> Tensor:
        """`x` through the layers, in the dtype of the first."""
        x = x.to(self.layers[0].weight.dtype)
        for index, layer in enumerate(self.layers):
            if index not in skip:
                x = torch.tanh(layer(x))
        return x


def plain_loss(model: nn.Module, x: Tensor, rank: int) -> Tensor:
    """A mean of squares, in which every layer takes part."""
    return model(x).abs().square().mean()


class Job:
    """One rank of a program.

    Args:
        rank, size: of this process and its group.
        face: the name of the wrapper.
        options: further arguments of dpfuse's wrappers; torch's has no such ones.
        folder: where what is told goes.
    """

    def __init__(self, rank: int, size: int, face: str, options: Mapping[str, Any], folder: Path) -> None:
        self.rank = rank
        self.size = size
        self.face = face
        self.folder = folder
        self.number = 0  # of the next step
        self._options = {} if face in TORCH else options
        self._optimizers: dict[int, dpfuse.ShardedOptimizer] = {}  # by the id of the wrapped module
        self._before: dict[int, dict[str, Tensor]] = {}  # the weights before a step, by the id of the module
        self._told = open(folder / f"told-{rank}", "a", buffering=1)  # noqa: SIM115  # lives as long as the process

    def tell(self, **facts: Any) -> None:
        """One line for the judge: `planted`, `off`, `same`, `raised`, `ended`."""
        self._told.write(json.dumps({"at": time.monotonic(), **facts}) + "\n")

    def plant(self) -> None:
        """Now the fault happens; seconds are counted from here."""
        self.tell(planted=True)

    def wrap(self, net: nn.Module, *, bucket_mb: float = BUCKET_MB, **options: Any) -> Any:
        """The wrapper around `net`, with buckets of about one layer."""
        make: Callable[..., nn.Module] = FACES[self.face]
        if FACES[self.face] is dpfuse.DataParallel:
            make = partial(make, comm_buffer_size=bucket_mb, last_comm_buffer_size=bucket_mb)
        else:
            make = partial(make, bucket_cap_mb=bucket_mb)
        model = make(net, **options, **self._options)
        if self.face in (SHARDED, IN_BACKWARD):
            # With a rate of 1 an update is the gradient, to as many digits as the weights have.
            options = {"step_in_backward": True, "lr": 1.0} if self.face == IN_BACKWARD else {"lr": RATE}
            made = dpfuse.ShardedOptimizer(model, torch.optim.SGD, net.parameters(), **options)
            self._optimizers[id(net)] = made
            self._note(net)
        return model

    def optimizer_of(self, net: nn.Module) -> torch.optim.Optimizer:
        """That which keeps one part on each rank, or else a plain one with momentum."""
        made = self._optimizers.get(id(net))
        if made is not None:
            return made
        return torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=RATE, momentum=0.9)

    def batch(self, rank: int | None = None, number: int | None = None) -> Tensor:
        """The input of a rank in a step; every rank can make that of any other."""
        rank = self.rank if rank is None else rank
        number = self.number if number is None else number
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randn(8, WIDTH, generator=generator)

    def truth(self, net: nn.Module, run: Run = plain_loss, micro_batches: int = 1) -> dict[str, Tensor | None]:
        """The mean over the ranks of the gradients of the next steps, summed; computed here, sent by nobody."""
        bare = copy.deepcopy(net)
        params = {name: param for name, param in bare.named_parameters() if param.requires_grad}
        total: dict[str, Tensor | None] = dict.fromkeys(params)
        for number in range(self.number, self.number + micro_batches):
            for rank in range(self.size):
                loss = run(bare, self.batch(rank, number), rank)
                grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
                for name, grad in zip(params, grads, strict=True):
                    if grad is not None:
                        share = grad / self.size
                        before = total[name]
                        total[name] = share if before is None else before + share
        return total

    def compare(self, net: nn.Module, truth: Mapping[str, Tensor | None]) -> None:
        """Tell how far the gradients are from `truth`, as a part of its largest element; a NaN is infinitely far."""
        worst = 0.0
        optimizer = self._optimizers.get(id(net))
        for name, param in net.named_parameters():
            if name in truth:
                grad: Tensor | None
                if optimizer is None:
                    grad = param.grad
                elif self.face == IN_BACKWARD:
                    grad = _updated_by(self._before[id(net)][name], param.detach(), truth[name])
                else:
                    grad = optimizer.full_gradient(param)
                worst = max(worst, _distance(grad, truth[name]))
        self.tell(off=worst, step=self.number)

    def step(self, model: Any, run: Run = plain_loss) -> None:
        """Forward, backward, a comparison with the true mean, and an optimizer that takes what there is."""
        truth = self.truth(model.module, run)
        model.zero_grad()
        run(model, self.batch(), self.rank).backward()
        self.compare(model.module, truth)
        self.descend(model.module)

    def descend(self, net: nn.Module) -> None:
        """A step of plain descent along the gradients as they are; the next batch is another one."""
        self.number += 1
        if id(net) in self._optimizers:
            self._optimizers[id(net)].step()
            self._note(net)
            return
        with torch.no_grad():
            for param in net.parameters():
                if param.grad is not None:
                    param.add_(param.grad, alpha=-RATE)

    def _note(self, net: nn.Module) -> None:
        if self.face == IN_BACKWARD:
            self._before[id(net)] = {name: param.detach().clone() for name, param in net.named_parameters()}

    def steps(self, model: Any, count: int = 12, run: Run = plain_loss) -> None:
        """So many of them."""
        for _ in range(count):
            self.step(model, run)


def _updated_by(before: Tensor, after: Tensor, expected: Tensor | None) -> Tensor:
    """The gradient that an update with a rate of 1 has used: `expected`, where the weights have no more digits."""
    grad = before - after
    if expected is None:
        return grad
    digits = 4 * torch.finfo(before.dtype).eps * torch.maximum(before.abs(), after.abs())
    return torch.where((grad - expected).abs() <= digits, expected, grad)


def _distance(got: Tensor | None, expected: Tensor | None) -> float:
    if expected is None:
        return 0.0 if got is None or not got.any() else float("inf")
    if got is None:
        return float(expected.abs().max() > 0) if expected.numel() else 0.0
    if not expected.numel():
        return 0.0
    got, expected = (value.to_dense() if value.is_sparse else value for value in (got.detach(), expected))
    wide = torch.promote_types(expected.dtype, torch.float64)
    off = (got.to(wide) - expected.to(wide)).abs().max() / expected.abs().max().clamp_min(1e-30)
    return float(off) if off.isfinite() else float("inf")
