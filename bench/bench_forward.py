"""Time of steps with the 53 BatchNorms of ResNet-50, compared with torch's DDP. Rank 0 sends the buffers.

The layers are registered, but not run: so their own time does not hide the cost of the wrapper. DDP sends the buffers
in the forward, dpfuse in the backward. So one case times whole steps, and one only the forwards of such steps. Cases on
the CPU (gloo): "host" is the CPU time of one thread with one rank, "pair" the wall time on two ranks.
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

UNSENT = {"dpfuse": "dpfuse, nothing sent", "DDP default": "DDP, nothing sent"}  # by the contender that sends


class Normed(nn.Module):
    """One parameter that is used, and 53 BatchNorms without parameters that are only registered."""

    def __init__(self) -> None:
        super().__init__()
        shapes = dict(resnet50())
        widths = [shape[0] for name, shape in shapes.items() if ("bn" in name or "downsample.1" in name)][::2]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, affine=False) for width in widths)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, scaled."""
        return x * self.weight


class _Step:
    """A step, to be timed `whole` or only to the end of its forward."""

    def __init__(self, model: nn.Module, x: Tensor, *, whole: bool) -> None:
        self._model, self._x, self._whole = model, x, whole
        self._loss: Tensor | None = None

    def __call__(self) -> None:
        """Run what is timed."""
        self._loss = self._model(self._x)
        if self._whole:
            self.finish()

    def finish(self) -> None:
        """Run what is left of the step."""
        if self._loss is not None:
            self._loss.backward()
            self._loss = None
            for param in self._model.parameters():
                param.grad = None


def _clocked(clock: Clock, step: Any) -> tuple[float, float]:
    times = clock(step)
    step.finish()
    return times


def time_buffers(part: str, effort: Effort, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Prove that buffers are rank 0's after a forward, then time steps in turns. Call it on every rank.

    Args:
        part: `"step"`: forward, backward and dropping the gradient. `"forward"`: only the forwards of such steps.
        effort: how long to measure.
        device: `"cpu"` or `"cuda"`.

    Returns:
        The fields of `StepTimes` by contender. `facts` has `sending`, the seconds that sending the buffers adds.
    """
    clock: Clock = cuda_clock if device == "cuda" else host_clock if dist.get_world_size() == 1 else wall_clock
    results = {name: StepTimes() for name in WRAPS}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in WRAPS}
    extras: dict[str, list[float]] = {name: [] for name in WRAPS}
    sending: dict[str, list[float]] = {name: [] for name in UNSENT}
    alive = []  # addresses affect the time, so each rebuild gets new memory
    x = torch.ones(1, device=device)
    for rebuild in range(effort.rebuilds):
        models = {name: wrap(Normed().to(device)) for name, wrap in WRAPS.items()}
        alive.append(models)
        for name in UNSENT:
            prove_buffers(name, models[name], x)
        steps = {name: _Step(model, x, whole=part == "step") for name, model in models.items()}
        times = interleave(steps, partial(_clocked, clock), rounds=effort.rounds, seed=rebuild)
        for name in WRAPS:
            pairs[name] += times[name]
            extras[name].append(paired_extra(times[name], times[BARE]))
        for name, unsent in UNSENT.items():
            sending[name].append(paired_extra(times[name], times[unsent]))
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
    found = {name: asdict(result) for name, result in results.items()}
    for name, seconds in sending.items():
        found[name]["facts"]["sending"] = median(seconds)
    return found


CPU_CASES: dict[str, tuple[int, str, str, Effort]] = {
    "host 53 BatchNorms": (1, "forward", "cpu", Effort(300, 9, 0)),
    "host 53 BatchNorms, step": (1, "step", "cpu", Effort(300, 9, 0)),
    "pair 53 BatchNorms": (2, "forward", "cpu", Effort(300, 3, 0)),
    "pair 53 BatchNorms, step": (2, "step", "cpu", Effort(300, 3, 0)),
}
CUDA_CASES = {
    "cuda 53 BatchNorms": (1, "forward", "cuda", Effort(300, 3, 0)),
    "cuda 53 BatchNorms, step": (1, "step", "cuda", Effort(300, 3, 0)),
}
QUICK = Effort(5, 1, 0)


@remembered
def _measured(case: str, quick: bool) -> Any:
    size, part, device, effort = (CPU_CASES | CUDA_CASES)[case]
    return on_ranks(size, device, time_buffers, part, QUICK if quick else effort, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = CUDA_CASES if metafunc.config.getoption("--gpu") else CPU_CASES
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in cases for variant in WRAPS])


@played_back
def test_forward(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "forward", "case": case, "variant": variant, **result, **facts})
