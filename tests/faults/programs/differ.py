"""Ranks that do not hold the same: models, options, buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.faults.job import BUCKET_MB, WIDTH, Job, Net


def model_shape(job: Job) -> None:
    net = Net()
    if job.rank == 1:
        net.layers[2], net.layers[3] = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    job.steps(job.wrap(net))


def model_count(job: Job) -> None:
    job.steps(job.wrap(Net(depth=4 + job.rank)))


class TwoLayers(nn.Module):
    """Two layers of one shape, in either order of registration."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """First, then second."""
        return self.second(torch.tanh(self.first(x)))


def model_order(job: Job) -> None:
    names = ["first", "second"]
    job.steps(job.wrap(TwoLayers(names[::-1] if job.rank == 1 else names)))


def model_dtype(job: Job) -> None:
    job.steps(job.wrap(Net(dtype=torch.float64 if job.rank == 1 else torch.float32)))


def bucket_size(job: Job) -> None:
    job.steps(job.wrap(Net(), bucket_mb=BUCKET_MB * (2 if job.rank == 1 else 1)))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def bn_buffers(job: Job) -> None:
    net = _normed()
    net[1].running_mean.fill_(float(job.rank))
    model = job.wrap(net)
    net.eval()  # the gradients depend on the buffers
    job.steps(model)
    job.tell(same=net[1].running_mean.tolist())


def eval_one_rank(job: Job) -> None:
    model = job.wrap(_normed())
    job.step(model)
    if job.rank == 0:
        job.plant()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(job.batch())
        model.train()
    job.steps(model)
