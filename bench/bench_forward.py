"""Time of a forward with the 53 BatchNorms of ResNet-50, compared with torch's DDP. Rank 0 sends the buffers.

The layers are registered, but not run: so their own time does not hide the cost of the wrapper. Cases on the CPU
(gloo): "host" is the CPU time of one thread with one rank, "pair" the wall time on two ranks.
"""

from __future__ import annotations

import inspect
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from bench.architectures import resnet50
from bench.baselines import BARE, Wrap
from bench.equality import prove_buffers
from bench.interleave import Clock, cuda_clock, host_clock, interleave, paired_extra, wall_clock
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, StepTimes

# Torch 2.13 has a new name for this argument.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_SEND = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"

WRAPS: dict[str, Wrap] = {
    BARE: lambda module: module,
    "bare again": lambda module: module,
    "dpfuse": dpfuse.DistributedDataParallel,
    "DDP default": DistributedDataParallel,
    "dpfuse, nothing sent": partial(dpfuse.DistributedDataParallel, forward_sync_buffers=False),
    "DDP, nothing sent": partial(DistributedDataParallel, **{_SEND: False}),
}


class Normed(nn.Module):
    """One parameter that is used, and 53 BatchNorms that are only registered."""

    def __init__(self) -> None:
        super().__init__()
        shapes = dict(resnet50())
        widths = [shape[0] for name, shape in shapes.items() if ("bn" in name or "downsample.1" in name)][::2]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, scaled."""
        return x * self.weight


def time_forwards(effort: Effort, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Prove that buffers are rank 0's after a forward, then time forwards in turns. Call it on every rank.

    Returns:
        The fields of `StepTimes` by contender.
    """
    clock: Clock = cuda_clock if device == "cuda" else host_clock if dist.get_world_size() == 1 else wall_clock
    results = {name: StepTimes() for name in WRAPS}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in WRAPS}
    extras: dict[str, list[float]] = {name: [] for name in WRAPS}
    alive = []  # addresses affect the time, so each rebuild gets new memory
    x = torch.ones(1, device=device)
    for rebuild in range(effort.rebuilds):
        models = {name: wrap(Normed().to(device)) for name, wrap in WRAPS.items()}
        alive.append(models)
        for name in ("dpfuse", "DDP default"):
            prove_buffers(name, models[name], x)
        times = interleave(
            {name: partial(model, x) for name, model in models.items()}, clock, rounds=effort.rounds, seed=rebuild
        )
        for name in WRAPS:
            pairs[name] += times[name]
            extras[name].append(paired_extra(times[name], times[BARE]))
    for name, result in results.items():
        result.seconds = [seconds for seconds, _ in pairs[name]]
        result.wall = median(wall for _, wall in pairs[name])
        result.extra, result.extra_lowest, result.extra_highest = (
            median(extras[name]),
            min(extras[name]),
            max(extras[name]),
        )
        result.extra_wall = median(ours[1] - bare[1] for ours, bare in zip(pairs[name], pairs[BARE], strict=True))
        buffers = list(alive[0][name].buffers())
        result.facts = {"buffers": len(buffers), "bytes": sum(b.numel() * b.element_size() for b in buffers)}
    return {name: asdict(result) for name, result in results.items()}


CPU_CASES: dict[str, tuple[int, str, Effort]] = {
    "host 53 BatchNorms": (1, "cpu", Effort(300, 9, 0)),
    "pair 53 BatchNorms": (2, "cpu", Effort(300, 3, 0)),
}
CUDA_CASES = {"cuda 53 BatchNorms": (1, "cuda", Effort(300, 3, 0))}
QUICK = Effort(5, 1, 0)


@remembered
def _measured(case: str, quick: bool) -> Any:
    size, device, effort = (CPU_CASES | CUDA_CASES)[case]
    return on_ranks(size, device, time_forwards, QUICK if quick else effort, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = CUDA_CASES if metafunc.config.getoption("--gpu") else CPU_CASES
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in cases for variant in WRAPS])


@played_back
def test_forward(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "forward", "case": case, "variant": variant, **result, **facts})
