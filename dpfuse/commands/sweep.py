"""What runs on every rank of `dpfuse bench`: steps of one model under many wrappers, checked, then timed in turns.

Each turn wraps the same module again, so a sweep needs the memory of one training only. It also puts the buckets at
other addresses in each turn; otherwise the addresses would influence the result.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

import dpfuse
from dpfuse.comm import collective
from dpfuse.commands.contenders import DEFAULT, Contender, Sizes, contenders, ramp_plan, without_duplicates
from dpfuse.commands.mean_check import check_mean
from dpfuse.commands.ranks import build_on_all_ranks, say
from dpfuse.commands.report_file import SavedRun, here
from dpfuse.commands.tune_command import tune_wrapped
from dpfuse.commands.user_model import Target
from dpfuse.engine.plan import BucketPlan

__all__ = ["Effort", "Row", "Sweep", "frozen_heap", "sweep"]

TUNING_STEPS = 5
WARM_UP = 2  # steps before the timing, with the final buckets


class Effort(NamedTuple):
    """How much to time."""

    rounds: int  # turns of each contender
    steps: int  # per turn


@dataclass(frozen=True)
class Row:
    """The measurements of one contender."""

    name: str
    sizes: Sizes | None  # of dpfuse
    buckets: int | None  # of dpfuse
    seconds: tuple[tuple[float, ...], ...]  # of each step on the slowest rank, by turn

    @property
    def turns(self) -> tuple[float, ...]:
        """The median time of a step in each turn."""
        return tuple(map(median, self.seconds))

    @property
    def median(self) -> float:
        """The median time of all steps."""
        return median(second for turn in self.seconds for second in turn)


@dataclass(frozen=True)
class Sweep:
    """The results on rank 0."""

    run: SavedRun
    plan: BucketPlan  # the tuned one
    rows: tuple[Row, ...]


def sweep(place: str, grid: list[Sizes], effort: Effort, *, find_unused: bool) -> Sweep:
    """Tune, check and time; to be called on every rank.

    Args:
        place: `module:factory`.
        grid: sizes to try in addition to the default.
        effort: the number of rounds and steps.
        find_unused: torch's `find_unused_parameters`.

    Raises:
        DPFuseError: a contender's gradients are not the mean, or nothing could be tuned.
    """
    target = build_on_all_ranks(place)
    group = collective.resolve_group(None)
    assert group is not None
    say(f"{place}: tuning")
    model = dpfuse.DataParallel(target.module, find_unused_parameters=True)
    tuning = tune_wrapped(target, model, TUNING_STEPS, (float("inf"), float("inf")))
    assert tuning.plan is not None
    assert tuning.timeline is not None
    del model
    tried = without_duplicates(grid, tuning.timeline, group.size())
    if duplicates := len({DEFAULT, *grid}) - len(tried):
        say(f"{duplicates} of the sizes are left out: they make the same buckets as others")
    made = {ramp_plan(tuning.timeline, *sizes, ranks=group.size()).layout for sizes in tried}
    tuned = None if tuning.plan.layout in made else tuning.plan
    compared = contenders(tried, tuned, find_unused=find_unused)
    buckets = {contender.name: _check(contender, target, group) for contender in compared}
    say(f"{len(compared)} contenders give the same gradients")
    times = _times(compared, target, effort, group)
    rows = [
        Row(contender.name, contender.sizes, buckets[contender.name], times[contender.name]) for contender in compared
    ]
    return Sweep(here(), tuning.plan, tuple(rows))


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep garbage collections inside the context from scanning the objects that exist already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _times(
    compared: list[Contender], target: Target, effort: Effort, group: dist.ProcessGroup
) -> dict[str, tuple[tuple[float, ...], ...]]:
    order = random.Random(0)  # the same on all ranks
    turns: dict[str, list[tuple[float, ...]]] = {contender.name: [] for contender in compared}
    start = perf_counter()
    with frozen_heap():
        for number in range(effort.rounds):
            for contender in order.sample(compared, len(compared)):
                turns[contender.name].append(_turn(contender, target, effort.steps, group))
            left = (perf_counter() - start) / (number + 1) * (effort.rounds - number - 1)
            say(f"round {number + 1} of {effort.rounds}" + (f", about {left:.0f} s to go" if left else ""))
    return {name: tuple(found) for name, found in turns.items()}


def _check(contender: Contender, target: Target, group: dist.ProcessGroup) -> int | None:
    """Check the gradients of a contender. Return its number of buckets; None if it is not dpfuse."""
    wrapped = contender.wrap(target.module)
    for number in range(1 + WARM_UP):
        if number == 1:
            contender.use_plan(wrapped)
        if contender.averages:
            check_mean(contender.name, target.module, partial(target.backward, wrapped), group)
        else:
            target.step(wrapped)
    return len(wrapped.bucket_plan.buckets) if isinstance(wrapped, dpfuse.DataParallel) else None


def _turn(contender: Contender, target: Target, steps: int, group: dist.ProcessGroup) -> tuple[float, ...]:
    """SavedRun one turn. Return the seconds of each step on the slowest rank."""
    wrapped = contender.wrap(target.module)
    step = partial(target.step, wrapped)
    step()  # records the order of gradients; then wrappers make new buckets
    contender.use_plan(wrapped)
    for _ in range(WARM_UP):
        step()
    gc.collect()
    device = collective.group_device(group)
    seconds = torch.tensor([_time(step, device, group) for _ in range(steps)], dtype=torch.float64, device=device)
    collective.all_reduce_max(seconds, group)
    return tuple(seconds.tolist())


def _time(step: Callable[[], None], device: torch.device, group: dist.ProcessGroup) -> float:
    collective.all_reduce_max(torch.zeros(1, device=device), group)  # all begin together
    _wait_for(device)
    begin = perf_counter()
    step()
    _wait_for(device)
    return perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
