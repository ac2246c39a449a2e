"""Parameters and gradients of unusual kinds and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.faults.job import WIDTH, Job, Net, plain_loss


class Strided(torch.autograd.Function):
    """The identity; its gradient arrives transposed, expanded or with gaps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, how: str) -> Tensor:
        ctx.how = how
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.how == "transposed":
            return grad.t().contiguous().t(), None
        if ctx.how == "gaps":
            return torch.stack([grad, torch.full_like(grad, float("nan"))], -1)[..., 0], None
        return grad.mean().expand_as(grad), None


class StridedNet(nn.Module):
    """Weights whose gradients are no plain blocks of memory, and a convolution in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {how: nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for how in ("transposed", "gaps", "expanded")}
        )
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """`x` through all of them."""
        for how, weight in self.weights.items():
            x = torch.tanh(x @ Strided.apply(weight, how))
        return self.conv(x.view(-1, 1, 8, 8).to(memory_format=torch.channels_last))


def strided_grads(job: Job) -> None:
    job.steps(job.wrap(StridedNet()))


class With(nn.Module):
    """A net, and a further parameter that `use` multiplies with."""

    def __init__(self, extra: Tensor, use: Any) -> None:
        super().__init__()
        self.net = Net(2)
        self.extra = nn.Parameter(extra)
        self._use = use

    def forward(self, x: Tensor) -> Tensor:
        """The net's result, and what `use` makes of it."""
        return self._use(self.net(x), self.extra)


def zero_size(job: Job) -> None:
    job.steps(job.wrap(With(torch.zeros(0, 3), lambda x, extra: x + extra.sum())))


def tied(job: Job) -> None:
    net = Net()
    net.layers[3].weight = net.layers[0].weight
    job.steps(job.wrap(net))


def complex_parameter(job: Job) -> None:
    job.steps(job.wrap(With(torch.randn(WIDTH, dtype=torch.complex64), lambda x, extra: x * extra)))


def several_dtypes(job: Job) -> None:
    net = nn.ModuleDict({"wide": nn.Linear(WIDTH, WIDTH, dtype=torch.float64), "net": Net(2)})

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["net"](self.parts["wide"](x.double()))

    job.steps(job.wrap(Mixed()))


class Sparse(nn.Module):
    """An embedding with sparse gradients, before a net."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=True)
        self.net = Net(2)

    def forward(self, x: Tensor) -> Tensor:
        """Rows that the batch picks, through the net."""
        return self.net(self.embedding((x[:, 0].abs() * 10).long() % 50))


def sparse_gradients(job: Job) -> None:
    model = job.wrap(Sparse())
    for _ in range(3):
        bare = Sparse()
        bare.embedding.sparse = False
        bare.load_state_dict(model.module.state_dict())
        truth = job.truth(bare)
        model.zero_grad()
        plain_loss(model, job.batch(), job.rank).backward()
        job.compare(model.module, truth)
        job.descend(model.module)


def meta_parameter(job: Job) -> None:
    net = Net()
    if job.rank == 1:
        net.layers[2].to("meta")
    job.steps(job.wrap(net))


def fp16_large(job: Job) -> None:
    """The mean fits into float16, the sum does not."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float16))

        def forward(self, factor: float) -> Tensor:
            return self.weight * factor

    model = job.wrap(Scaled())
    for _ in range(3):
        model.zero_grad()
        model(48000.0).sum().backward()
        job.compare(model.module, {"weight": torch.full((WIDTH,), 48000.0, dtype=torch.float16)})


def nan_one_rank(job: Job) -> None:
    def spoil(grad: Tensor) -> Tensor:
        if job.rank != 1 or job.number != 2:
            return grad
        job.plant()
        return torch.where(torch.eye(WIDTH, dtype=torch.bool), float("nan"), grad)

    model = job.wrap(Net())
    model.module.layers[1].weight.register_hook(spoil)
    job.steps(model, 14)
