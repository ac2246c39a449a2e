"""A ratio is the quotient it says, and a goal counts as met only if it was measured and reached."""

from __future__ import annotations

import pytest

from bench.goals import Entry, Outcome, judge, ratio


def entry(case: str, variant: str, seconds: float, suite: str = "step", **info: object) -> Entry:
    return Entry(suite, case, variant, seconds, seconds, 0.0, 20, dict(info))


def host(count: int, **extras: float) -> list[Entry]:
    return [entry(f"host chain {count}", name.replace("_", " "), 1.0, extra=extra) for name, extra in extras.items()]


def test_a_ratio_needs_a_denominator_above_zero():
    assert ratio(3.0, 4.0) == 0.75
    assert ratio(3.0, 0.0) is None
    assert ratio(3.0, -1e-9) is None


@pytest.mark.parametrize(
    ("value", "goal", "at_least", "met"),
    [(0.5, 0.5, False, True), (0.51, 0.5, False, False), (2.0, 2.0, True, True), (1.9, 2.0, True, False),
     (None, 0.5, False, False), (0.1, None, False, None), (float("inf"), 1, False, False)],
)  # fmt: skip
def test_a_goal_is_met_only_by_a_value_that_reaches_it(value, goal, at_least, met):
    assert Outcome("step", "case", "what", value, goal, at_least).met is met


@pytest.mark.parametrize(("count", "goal"), [(10, 0.5), (100, 0.38), (1000, 0.30)])
def test_host_cost_is_judged_by_what_is_added_to_the_bare_step(count, goal):
    outcomes = judge(host(count, dpfuse_views=3.0, dpfuse_private=4.0, DDP_default=10.0))
    assert (outcomes[0].value, outcomes[0].goal, outcomes[0].met) == (pytest.approx(0.3), goal, True)
    assert outcomes[1].goal is None


def test_the_best_mode_of_ddp_is_a_goal_from_100_parameters_on():
    measured = host(100, **{"dpfuse_views": 3.0, "dpfuse_private": 4.0, "DDP_default": 9.0, "DDP_view_+_batched": 5.0})
    best = judge(measured)[-1]
    assert (best.value, best.goal, best.met) == (pytest.approx(0.6), 0.75, True)


def test_no_sync_may_be_as_slow_as_ddp_in_the_same_run():
    case = "no_sync chain 1000"
    measured = [entry(case, "bare", 1.0, extra=0.0), entry(case, "DDP default", 1.1, extra=0.1)]
    (outcome,) = judge([*measured, entry(case, "dpfuse views", 1.11, extra=0.11)])
    assert outcome.goal == pytest.approx(1.12)
    assert outcome.met


def test_kernels_that_no_profiler_saw_are_not_few_kernels():
    facts = {"packs": 0, "unpacks": 0, "buckets": 2, "host_to_device": 0, "extra": 1.0}
    names = ("bare", "dpfuse views", "dpfuse private", "DDP default")
    outcomes = judge(entry("cuda ResNet-50 b64", name, 1.0, **facts) for name in names)
    launches = [outcome for outcome in outcomes if outcome.what.startswith("kernels per bucket")]
    assert [outcome.met for outcome in launches] == [False, False]


def test_the_best_mode_on_cuda_is_found_in_the_run():
    facts = {"packs": 2, "unpacks": 0, "buckets": 2, "host_to_device": 0}
    extras = {"bare": 0.0, "dpfuse views": 1.0, "dpfuse private": 2.0, "DDP default": 8.0, "DDP view": 4.0}
    outcomes = judge(entry("cuda ResNet-50 b64", name, 1.0, extra=extra, **facts) for name, extra in extras.items())
    values = {outcome.what: (outcome.value, outcome.met) for outcome in outcomes}
    assert values["extra over bare, dpfuse views / DDP default"] == (0.125, True)
    assert values["extra over bare, dpfuse views / its best mode, DDP view"] == (0.25, True)
    assert values["kernels per bucket, dpfuse views"] == (1.0, True)


def test_forwards_that_send_buffers_are_judged_at_one_rank():
    names = ("dpfuse", "DDP default", "dpfuse, nothing sent", "DDP, nothing sent")

    def measured(case: str, ours: float) -> list[Entry]:
        extras = dict(zip(names, (ours, 1.0, 3.0, 4.0), strict=True))
        return [entry(case, name, 1.0, "forward", extra=extra) for name, extra in extras.items()]

    outcomes = judge([*measured("host 53 BatchNorms", 0.29), *measured("pair 53 BatchNorms", 0.31)])
    assert {outcome.suite for outcome in outcomes} == {"forward"}
    assert [(outcome.value, outcome.met) for outcome in outcomes] == [
        (0.29, True),
        (0.75, None),
        (0.31, None),
        (0.75, None),
    ]
