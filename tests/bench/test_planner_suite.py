"""The planner's benchmark counts what it says: plans that are better than the exact one would be seen."""

from __future__ import annotations

from typing import Any

import pytest

import dpfuse
from bench import bench_planner
from bench.bench_planner import EXACT, RECORDED, _beside_rivals, _brute_force, _earliest_end
from bench.goals import Entry, judge
from bench.published_plans import ddp_plan, single_plan
from bench.record_timeline import MODELS, load
from bench.simulation import simulate
from dpfuse.tune import CostTable, Timeline, optimal_plan


def entries(case: str, measured: dict[str, Any]) -> list[Entry]:
    return [
        Entry("planner", case, name, sorted(result["seconds"])[len(result["seconds"]) // 2], 0.0, 0.0, 1, result)
        for name, result in measured.items()
    ]


def test_the_best_of_all_plans_is_found_by_hand():
    specs = [dpfuse.ParamSpec(name, (250_000,), "float32") for name in "ab"]
    timeline = Timeline(specs, [0.004, 0.001], 0.004)
    # Apart: the second is sent at 1 and lands at 2.1 ms, the first at 4 and 5.1 ms. Together they land at 6.1 ms.
    assert _earliest_end(timeline, CostTable.affine(1e-4, 1e9)) == pytest.approx(0.0051)
    # With a start-up of 5 ms, apart 1 + 6 + 6, together 4 + 7.
    assert _earliest_end(timeline, CostTable.affine(5e-3, 1e9)) == pytest.approx(0.011)


def test_the_exact_planner_differs_nowhere(monkeypatch):
    (outcome,) = judge(entries("brute force", _brute_force(quick=True)))
    assert (outcome.value, outcome.met) == (0, True)
    monkeypatch.setattr(bench_planner, "optimal_plan", lambda timeline, cost: ddp_plan(timeline))
    (outcome,) = judge(entries("brute force", _brute_force(quick=True)))
    assert outcome.value > 5
    assert outcome.met is False


@pytest.mark.slow
def test_a_rival_that_lands_earlier_is_counted(monkeypatch):
    first, *rest = judge(entries(RECORDED, _beside_rivals(RECORDED, quick=True)))
    assert (first.value, first.met) == (0, True)
    assert all(outcome.value >= 1 - 1e-9 and outcome.met is None for outcome in rest)
    monkeypatch.setattr(bench_planner, "optimal_plan", lambda timeline, cost: single_plan(timeline))
    first, *_ = judge(entries(RECORDED, _beside_rivals(RECORDED, quick=True)))
    assert first.value > 5
    assert first.met is False


def test_the_recorded_backward_is_that_of_a_resnet_50():
    (timeline, cost), *_ = reversed(bench_planner._problems(RECORDED, quick=True)[:6])
    assert len(timeline.specs) == 161
    assert sum(spec.numel for spec in timeline.specs) == 25_557_032
    assert timeline.specs[timeline.order[0]].name.startswith("fc")
    assert len(cost.sizes) == 18, "the measured table, not a preset"
    assert simulate(timeline, optimal_plan(timeline, cost), cost).end >= timeline.backward_end


@pytest.mark.parametrize(("seconds", "met"), [(0.09, True), (0.11, False)])
def test_a_thousand_gradients_have_a_tenth_of_a_second(seconds, met):
    (outcome,) = judge(entries("1000 gradients", {EXACT: {"seconds": [seconds], "gradients": 1000}}))
    assert outcome.met is met


def test_every_model_has_its_recorded_backward():
    for name in MODELS:
        timeline, cost = load(name)
        assert len(timeline.ready) == len(timeline.specs) > 100
        assert cost(1e6) > 0
