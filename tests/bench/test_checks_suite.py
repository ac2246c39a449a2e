"""The benchmark of the checks: its stand-ins leave out what they stand for, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from bench.bench_checks import METRICS, WRAPS, NoReport, NoSignature, NoWindow, time_checks, without_checks
from bench.goals import Entry, judge
from bench.models import chain
from bench.step_time import Effort

REPLACED = (NoWindow, NoSignature, NoReport)


def few_steps(rank: int, size: int) -> list[str]:
    results = time_checks(few, Effort(3, 1, 0))
    assert all(len(result["seconds"]) == 3 for result in results.values())
    return list(results)


def few():
    return chain(3)


@pytest.mark.slow
def test_gradients_are_averaged_with_and_without(ranks):
    assert ranks(few_steps) == [list(WRAPS)] * 2


def parts(model: dpfuse.DataParallel) -> list[object]:
    sync = model._sync
    return [sync.window, sync._follower._signature, sync.grads.reducer.buckets[-1].parts.report]


def test_every_check_has_its_stand_in(rank: int, size: int) -> None:
    def trained() -> dpfuse.DataParallel:
        model = dpfuse.DataParallel(nn.Linear(3, 3))
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
        return model

    with without_checks():
        without = trained()
    checked = trained()
    for part, real, stand_in in zip(parts(without), parts(checked), REPLACED, strict=True):
        assert type(part) is stand_in
        assert type(real) is not stand_in
    assert all(bucket._around.board is None for bucket in without.reducer.buckets)
    assert all(bucket._around.board is not None for bucket in checked.reducer.buckets)


@pytest.mark.parametrize(
    ("case", "extra", "met"),
    [
        ("100 parameters", 19e-6, True),
        ("100 parameters", 21e-6, False),
        ("10 parameters", 1.0, None),
        ("step of 5 ms", 24e-6, True),
        ("step of 5 ms", 26e-6, False),
    ],
)
def test_the_checks_have_twenty_microseconds_and_half_a_percent_of_a_short_step(case, extra, met):
    entries = [
        Entry("checks", case, name, 0.005, 0.005, 0.0, 5, {"extra": extra if name == "with checks" else 0.0})
        for name in WRAPS
    ]
    outcome = judge(entries)[0]
    assert outcome.met is met


@pytest.mark.parametrize(("extra", "met"), [(49e-6, True), (51e-6, False)])
def test_metrics_have_one_percent_of_a_short_step(extra, met):
    entries = [
        Entry("checks", "step of 5 ms", name, 0.005, 0.005, 0.0, 5, {"extra": extra if name in METRICS else 0.0})
        for name in WRAPS
    ]
    assert [outcome.met for outcome in judge(entries)[1:]] == [met] * len(METRICS)
