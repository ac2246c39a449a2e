"""Simulated schedules, by hand."""

from __future__ import annotations

import pytest

import dpfuse
from bench.simulation import simulate
from dpfuse.tune import CostTable, Timeline, plan_from_groups

SPECS = [dpfuse.ParamSpec(name, (250,), "float32") for name in ("first", "second", "third", "fourth")]
TIMELINE = Timeline(SPECS, [4.0, 2.5, 2.0, 1.0], 4.5)
COST = CostTable.affine(0.5, 1000.0)  # a gradient of 1000 bytes takes one second


def test_a_schedule_by_hand():
    schedule = simulate(TIMELINE, plan_from_groups(SPECS, [[3], [2, 1], [0]]), COST)
    # The last one is ready at 4, held until the end of backward at 4.5, then waits for the link.
    assert schedule.sent == (1.0, 2.5, 5.0)
    assert schedule.landed == (2.5, 5.0, 6.5)
    assert (schedule.end, schedule.exposed) == (6.5, 2.0)


def test_the_last_bucket_is_sent_when_backward_has_ended():
    schedule = simulate(TIMELINE, plan_from_groups(SPECS, [[3, 2, 1, 0]]), CostTable.affine(0.0, 1e9))
    assert schedule.sent == (4.5,)


def test_buckets_are_sent_in_the_order_of_the_plan():
    schedule = simulate(TIMELINE, plan_from_groups(SPECS, [[0], [1], [2], [3]]), COST)
    assert schedule.sent == (4.0, 5.5, 7.0, 8.5)


def test_a_plan_of_other_parameters_is_refused():
    for specs in (SPECS[:3], [*SPECS[:3], dpfuse.ParamSpec("other", (250,), "float32")]):
        with pytest.raises(ValueError, match="expected the parameters of one model"):
            simulate(TIMELINE, dpfuse.plan_buckets(specs), COST)
