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


def test_host_cost_is_judged_by_what_is_added_to_the_bare_step():
    outcomes = judge(host(100, dpfuse_views=2.0, dpfuse_private=11.0, DDP_default=10.0))
    assert (outcomes[0].value, outcomes[0].met) == (pytest.approx(0.2), True)
    assert (outcomes[2].value, outcomes[2].met) == (pytest.approx(1.1), False)


def test_the_best_peer_is_the_fastest_wrapper_of_another_library():
    extras = {"dpfuse views": 3.0, "dpfuse private": 4.0, "DDP default": 9.0, "DDP view + batched": 5.0}
    outcomes = {o.what: o for o in judge(host(100, **extras, **{"FSDP2 replicate": 60.0, "sketch": 1.0}))}
    best = outcomes["extra over bare, dpfuse views / the best peer, DDP view + batched"]
    assert (best.value, best.met) == (pytest.approx(0.6), True)
    faster = {o.what: o for o in judge(host(100, **extras, **{"FSDP2 replicate": 2.0}))}
    assert faster["extra over bare, dpfuse views / the best peer, FSDP2 replicate"].met is False


def test_kernels_that_no_profiler_saw_are_not_few_kernels():
    facts = {"packs": 0, "unpacks": 0, "buckets": 2, "host_to_device": 0, "extra": 1.0}
    names = ("bare", "dpfuse views", "dpfuse private", "DDP default")
    outcomes = judge(entry("cuda ResNet-50 b64", name, 1.0, **facts) for name in names)
    launches = [outcome for outcome in outcomes if outcome.what.startswith("kernels per bucket")]
    assert [outcome.met for outcome in launches] == [False, False]


def network(exposed: float, *, predicted: float, device: str = "cpu", planned: float = 1.0) -> list[Entry]:
    """A step of which 0.6 s are left where nothing is sent, and of DDP's best mode, 1 s."""
    info = {"exposed": exposed, "predicted": predicted, "predicted_packed": predicted, "device": device}
    medians = {
        "dpfuse planned, nothing sent": 0.6,
        "dpfuse views": 1.1,
        "dpfuse private": 0.9,
        "DDP default": 1.2,
        "DDP view": 1.0,
    }
    peers = [entry("20 us", name, seconds, "overlap") for name, seconds in medians.items()]
    return [entry("20 us", "dpfuse planned", planned, "overlap", **info), *peers]


def overlap(what: str, *entries: Entry) -> Outcome:
    (found,) = [outcome for outcome in judge(entries) if outcome.what.startswith(what)]
    return found


@pytest.mark.parametrize(
    ("exposed", "met"), [(0.40, True), (0.449, True), (0.351, True), (0.451, False), (0.349, False)]
)
def test_a_step_must_be_predicted_within_a_twentieth_of_it_either_way(exposed, met):
    outcome = overlap("error of the predicted step", *network(exposed, predicted=0.40))
    assert outcome.value == pytest.approx(abs(exposed - 0.40))
    assert outcome.met is met


@pytest.mark.parametrize(
    ("device", "exposed", "predicted", "goal", "met"),
    [("cpu", 0.45, 0.40, 0.15, True), ("cpu", 0.47, 0.40, 0.15, False), ("cuda", 0.41, 0.40, 0.05, True),
     ("cuda", 0.43, 0.40, 0.05, False), ("cpu", 0.20, 0.14, None, None), ("cpu", 0.20, 0.0, None, None)],
)  # fmt: skip
def test_exposed_time_must_be_predicted_where_it_is_a_fair_part_of_the_step(device, exposed, predicted, goal, met):
    outcome = overlap("error of the predicted exposed", *network(exposed, predicted=predicted, device=device))
    assert (outcome.goal, outcome.met) == (goal, met)


def test_default_arguments_are_held_against_the_best_peer_in_each_network_and_in_the_mean():
    second = [entry("500 us", e.variant, e.median * (e.variant != "dpfuse views" or 0.7), "overlap", **e.info)
              for e in network(0.4, predicted=0.4)]  # fmt: skip
    outcomes = judge([*network(0.4, predicted=0.4), *second])
    default = [outcome for outcome in outcomes if "dpfuse views with default arguments" in outcome.what]
    assert [(outcome.case, outcome.goal, outcome.met) for outcome in default] == [
        ("20 us", 1.00, False), ("500 us", 1.00, True), ("all", 0.95, True)
    ]  # fmt: skip
    assert default[2].value == pytest.approx((1.1 + 0.77) / 2)
    private = [outcome for outcome in outcomes if "dpfuse private with default arguments" in outcome.what]
    assert [(outcome.value, outcome.met) for outcome in private] == [(0.9, True)] * 3
