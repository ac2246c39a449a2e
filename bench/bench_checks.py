"""What the checks cost that are always on, and what `metrics()` costs: whole steps in turns.

A step with the checks is timed beside one with stand-ins that look at nothing in their place. A step of a model that
was wrapped with `metrics=True` and reads them each time is timed beside one with the checks alone.

Weights are compared after a step of an optimizer. These steps have none: `bench_training` times that.
Left out are the signature of the module, the counts of forwards and backwards, the report that compares them over the
ranks, and what the heartbeat is told.
CPU time of the thread that trains, on two gloo ranks: what it waits for costs it nothing. The comparison of the models
happens once, when they are wrapped, and is none of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dpfuse
from bench.equality import prove_gradients
from bench.interleave import host_clock, interleave, paired_extra
from bench.models import Workload, chain, layers
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, StepTimes
from dpfuse.engine.reading import ALL_WELL, Outcome, Reading
from dpfuse.engine.report import Report
from dpfuse.engine.sync_decision import Window
from dpfuse.model.signature import ModelSignature

__all__ = ["WRAPS", "five_ms", "time_checks", "time_in_turns", "without_checks"]


class NoSignature(ModelSignature):
    """A module that never changes."""

    def unchanged(self) -> bool:
        """Yes."""
        return True


class NoWindow(Window):
    """Counts nothing."""

    def begin(self) -> None:
        """Nothing."""

    def forward_begins(self, **_: Any) -> None:
        """Nothing."""

    def forward_ends(self, **_: Any) -> None:
        """Nothing."""

    def reached(self, window: int) -> None:
        """Nothing."""

    def backward_begins(self, **_: Any) -> bool:
        """Every backward synchronises outside of `no_sync()`."""
        return self.require_sync

    def gradients_accumulated(self) -> None:
        """Nothing."""


class NoReport(Report):
    """Has no elements: nothing travels behind the gradients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.numel = 0

    def source(self, outcome: Outcome) -> Any:
        """Nothing."""
        return None

    def landed(self, view: Tensor) -> None:
        """Nothing."""

    def read(self, outcome: Outcome, **_: Any) -> Reading:
        """All is well."""
        return ALL_WELL


@contextmanager
def without_checks() -> Iterator[None]:
    """Whatever is wrapped in here, and makes its first steps, is not checked later either."""
    with (
        patch("dpfuse.model.module_sync.ModelSignature", NoSignature),
        patch("dpfuse.model.module_sync.Window", NoWindow),
        patch("dpfuse.engine.sync.Report", NoReport),
        patch("dpfuse.engine.sync.board_of", lambda group: None),
    ):
        yield


METRICS = {"with metrics": True, "with metrics of every 20th": 20}
WRAPS = ("with checks", "with checks again", "without checks", *METRICS)


def five_ms() -> Workload:
    """Layers whose step takes some five milliseconds on one core."""
    return layers(12, 256, rows=64)


def time_checks(build: Callable[[], Workload], effort: Effort) -> dict[str, dict[str, Any]]:
    """Prove that gradients are averaged with and without checks, then time steps in turns; on every rank.

    Returns:
        The fields of `StepTimes` by contender; `extra` is over the steps without checks, and for metrics over the
        steps with checks.
    """

    # Models of one group are compared in the order in which they take turns, which is none of one model's step.
    groups = {name: dist.new_group() for name in WRAPS}

    def make(name: str, workload: Workload) -> Callable[[], None]:
        if name != "without checks":
            return proved(name, workload, groups[name], metrics=METRICS.get(name, False))
        with without_checks():
            return proved(name, workload, groups[name], checks="off")

    bases = {name: "with checks" if name in METRICS else "without checks" for name in WRAPS}
    return time_in_turns(build, make, bases, effort)


def time_in_turns(
    build: Callable[[], Workload],
    make: Callable[[str, Workload], Callable[[], None]],
    bases: Mapping[str, str],
    effort: Effort,
    steps: int = 1,
) -> dict[str, dict[str, Any]]:
    """Time contenders in turns, in CPU time of this thread.

    Args:
        build: makes a workload.
        make: gets the name of a contender and a workload; returns what is timed.
        bases: by contender, the one over which its `extra` is.
        effort: how often.
        steps: that one call of what is timed makes.

    Returns:
        The fields of `StepTimes` by contender, for one step.
    """
    names = list(bases)
    results = {name: StepTimes() for name in names}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    extras: dict[str, list[float]] = {name: [] for name in names}
    alive = []  # where an object lies in the heap matters, so each rebuild gets memory of its own
    for rebuild in range(effort.rebuilds):
        torch.manual_seed(dist.get_rank())
        made = {}
        for number in range(len(names)):
            name = names[(number + rebuild) % len(names)]
            workload = build()
            made[name] = make(name, workload)
        alive.append(made)
        rounds = interleave(made, host_clock, rounds=effort.rounds, seed=rebuild)
        times = {name: [(cpu / steps, wall / steps) for cpu, wall in found] for name, found in rounds.items()}
        for name in names:
            pairs[name] += times[name]
            extras[name].append(paired_extra(times[name], times[bases[name]]))
    for name, result in results.items():
        result.seconds = [seconds for seconds, _ in pairs[name]]
        result.wall = median(wall for _, wall in pairs[name])
        result.extra, result.extra_lowest, result.extra_highest = (
            median(extras[name]), min(extras[name]), max(extras[name])
        )  # fmt: skip
        result.facts = {"parameters": len(list(workload.module.parameters()))}
    return {name: asdict(result) for name, result in results.items()}


def proved(
    name: str,
    workload: Workload,
    group: dist.ProcessGroup,
    *,
    metrics: bool | int = False,
    checks: Literal["raise", "off"] = "raise",
) -> Callable[[], None]:
    """A step of the wrapped workload, which averages rightly; with metrics, it reads them."""
    model = dpfuse.DataParallel(workload.module, group=group, metrics=metrics, check_training=checks)
    params = list(workload.module.parameters())

    def step() -> None:
        workload.loss(model).backward()
        if metrics:
            model.metrics()
        for param in params:
            param.grad = None

    prove_gradients(name, workload.module, lambda: workload.loss(model).backward(), averaged=True)
    return step


CASES: dict[str, tuple[Callable[[], Workload], Effort]] = {
    "10 parameters": (partial(chain, 10), Effort(300, 7, 0)),
    "100 parameters": (partial(chain, 100), Effort(300, 7, 0)),
    "1000 parameters": (partial(chain, 1000), Effort(50, 5, 0)),
    "step of 5 ms": (five_ms, Effort(100, 7, 0)),
}
QUICK = Effort(5, 1, 0)


@remembered
def _measured(case: str, quick: bool) -> Any:
    build, effort = CASES[case]
    return on_ranks(2, "cpu", time_checks, build, QUICK if quick else effort)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in CASES for variant in WRAPS])


@played_back
def test_checks(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "checks", "case": case, "variant": variant, **result, **facts})
