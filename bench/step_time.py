"""Times whole steps (forward, backward, dropping gradients) of one model with several wrappers, in turns."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench.baselines import BARE, Wrap
from bench.counts import count
from bench.equality import prove_contender
from bench.frozen_heap import frozen_heap
from bench.interleave import Clock, cuda_clock, host_clock, interleave, paired_extra, wall_clock
from bench.models import Workload
from bench.peers import backward_of
from bench.rank_group import agreed
from dpfuse import DataParallel, DistributedDataParallel

__all__ = ["Contender", "Effort", "StepTimes", "affordable", "contenders_of", "time_steps"]

FEWEST_ROUNDS = 5
STEADY_STEPS = 5  # then gradients repeat their addresses, and nothing more is uploaded to a GPU


class Effort(NamedTuple):
    """How long to measure: the first limit that is reached ends it, rounds or seconds."""

    rounds: int  # per rebuild
    rebuilds: int
    seconds: float  # for all timed rounds together


@dataclass
class StepTimes:
    """Times of one contender, in seconds per step."""

    seconds: list[float] = field(default_factory=list)  # CPU, wall or GPU time, depending on the case
    wall: float = 0.0  # median
    extra: float = 0.0  # over the bare module: median over rebuilds of the median over rounds
    extra_wall: float = 0.0
    extra_lowest: float = 0.0  # of the rebuilds
    extra_highest: float = 0.0
    facts: dict[str, int] = field(default_factory=dict)  # bytes and counts


class Contender(NamedTuple):
    """One wrapped model."""

    module: nn.Module  # the module inside `wrapped`, or `wrapped` itself
    wrapped: nn.Module
    backward: Callable[[], None]
    step: Callable[[], None]  # `backward`, then dropping the gradients


def time_steps(
    build: Callable[[], Workload],
    wraps: Mapping[str, Wrap],
    *,
    effort: Effort,
    device: str = "cpu",
    no_sync: bool = False,
    wire: torch.dtype | None = None,
) -> dict[str, dict[str, Any]]:
    """Prove, count and time. Call it on every rank of the default group.

    All contenders are rebuilt several times in random order, and earlier ones stay alive: the addresses of objects and
    the order of building change the time of a step by up to 10 %.

    Args:
        build: makes the model, with its tensors on `device`.
        wraps: by contender, with `BARE`.
        effort: how long to measure.
        device: `"cpu"`: CPU time of the calling thread with one rank, wall time with several. `"cuda"`: GPU time.
        no_sync: whether steps run inside `no_sync()`.
        wire: dtype in which all wrappers send gradients, if it is not their own.

    Returns:
        The fields of `StepTimes` by contender.
    """
    cuda = device == "cuda"
    alive: list[dict[str, Contender]] = []
    results = {name: StepTimes() for name in wraps}
    clock: Clock = cuda_clock if cuda else host_clock if dist.get_world_size() == 1 else wall_clock
    extras: dict[str, list[tuple[float, float]]] = {name: [] for name in wraps}
    walls: dict[str, list[float]] = {name: [] for name in wraps}
    torch.manual_seed(dist.get_rank())  # every rank has its own data
    with torch.device(device):
        workload = build()
    for param in workload.module.parameters():
        dist.broadcast(param.data, 0)  # some peers leave this to the program
    for rebuild in range(effort.rebuilds):
        contenders = contenders_of(workload, wraps, no_sync=no_sync, seed=rebuild)
        alive.append(contenders)
        if rebuild == 0:
            for name, contender in contenders.items():
                module, wrapped, backward = contender.module, contender.wrapped, contender.backward
                averaged = wrapped is not module and not no_sync
                prove_contender(name, module, wrapped, workload, averaged=averaged, wire=wire, backward=backward)
                results[name].facts = _facts(contender, cuda=cuda)
        steps = {name: contender.step for name, contender in contenders.items()}
        with frozen_heap():
            times = interleave(steps, clock, rounds=affordable(steps, effort, device), seed=rebuild)
        for name, pairs in times.items():
            results[name].seconds += [seconds for seconds, _ in pairs]
            walls[name] += [wall for _, wall in pairs]
            extras[name].append((paired_extra(pairs, times[BARE]), paired_extra(pairs, times[BARE], 1)))
    for name, result in results.items():
        result.wall = median(walls[name])
        result.extra, result.extra_wall = (median(extra[part] for extra in extras[name]) for part in (0, 1))
        result.extra_lowest, result.extra_highest = min(extras[name])[0], max(extras[name])[0]
    return {name: asdict(result) for name, result in results.items()}


def contenders_of(
    workload: Workload, wraps: Mapping[str, Wrap], *, no_sync: bool = False, seed: int = 0
) -> dict[str, Contender]:
    """Wrap copies of one model, which share its weights, in random order.

    Args:
        workload: the model, and its loss.
        wraps: by contender.
        no_sync: whether steps run inside `no_sync()`.
        seed: of the order.
    """
    names = list(wraps)
    random.Random(seed).shuffle(names)
    return {name: _contender(workload, wraps[name], no_sync=no_sync) for name in names}


def _contender(workload: Workload, wrap: Wrap, *, no_sync: bool) -> Contender:
    module = copy.deepcopy(workload.module)
    # Weights are never written here, so all contenders share them. That saves memory for large models.
    for param, shared in zip(module.parameters(), workload.module.parameters(), strict=True):
        param.data = shared.data
    wrapped = wrap(module)
    params = [param for param in module.parameters() if param.requires_grad]
    loss = workload.loss
    context: Any = wrapped.no_sync if no_sync and wrapped is not module else nullcontext
    start = backward_of(wrapped)

    def backward() -> None:
        with context():
            start(loss(wrapped))

    def step() -> None:
        backward()
        for param in params:
            param.grad = None

    return Contender(module, wrapped, backward, step)


def _facts(contender: Contender, *, cuda: bool) -> dict[str, int]:
    for _ in range(STEADY_STEPS):
        contender.step()
    params = [param for param in contender.module.parameters() if param.requires_grad]
    facts = {"bytes": sum(p.numel() * p.element_size() for p in params), "parameters": len(params)}
    facts |= count(contender.step, cuda=cuda)._asdict()
    if isinstance(contender.wrapped, DataParallel | DistributedDataParallel):  # torch's class has a reducer, too
        buckets = contender.wrapped.reducer.buckets
        facts["buckets"] = len(buckets)  # with that of the report, where no other bucket has its dtype
        # Each pack and unpack reads and writes every byte of its bucket once, except for gradients reduced in place.
        facts["bytes_in_place"] = sum(bucket.parts.exchange.bytes_in_place for bucket in buckets)
        passes = (facts["packs"] + facts["unpacks"]) / facts["buckets"]
        facts["bytes_moved"] = round(2 * passes * (facts["bytes"] - facts["bytes_in_place"]))
    return facts


def affordable(steps: Mapping[str, Callable[[], object]], effort: Effort, device: str) -> int:
    """Return the number of rounds of all `steps` for one rebuild. Call it on every rank."""
    start = perf_counter()
    for step in steps.values():
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - start
    rounds = int(effort.seconds / effort.rebuilds / seconds)
    # All ranks must run the same number of steps.
    return agreed(max(FEWEST_ROUNDS, min(effort.rounds, rounds)), device)
