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


@pytest.mark.parametrize(("count", "goal"), [(10, 0.75), (100, 0.40), (1000, 0.25)])
def test_host_cost_is_judged_by_what_is_added_to_the_bare_step(count, goal):
    outcomes = judge(host(count, dpfuse_views=2.0, dpfuse_private=11.0, DDP_default=10.0))
    assert (outcomes[0].value, outcomes[0].goal, outcomes[0].met) == (pytest.approx(0.2), goal, True)
    private = outcomes[2]
    assert private.what == "extra over bare, dpfuse private / DDP default"
    assert (private.value, private.goal, private.met) == (pytest.approx(1.1), 1.0, False)


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_the_best_peer_is_the_fastest_wrapper_of_another_library(count):
    extras = {"dpfuse views": 3.0, "dpfuse private": 4.0, "DDP default": 9.0, "DDP view + batched": 5.0}
    outcomes = {o.what: o for o in judge(host(count, **extras, **{"FSDP2 replicate": 60.0, "sketch": 1.0}))}
    best = outcomes["extra over bare, dpfuse views / the best peer, DDP view + batched"]
    assert (best.value, best.goal, best.met) == (pytest.approx(0.6), 0.90, True)
    faster = {o.what: o for o in judge(host(count, **extras, **{"FSDP2 replicate": 2.0}))}
    assert faster["extra over bare, dpfuse views / the best peer, FSDP2 replicate"].met is False


@pytest.mark.parametrize(
    ("model", "views", "private"), [("100 MB large", 1.00, 1.00), ("1000 tiny", 0.95, None), ("CNN", 0.95, None)]
)
def test_steps_on_two_ranks_are_held_against_the_best_peer(model, views, private):
    seconds = {
        "dpfuse views": 0.9,
        "dpfuse private": 1.1,
        "DDP default": 1.3,
        "DDP view": 1.0,
        "DeepSpeed stage 0": 2.0,
    }
    outcomes = judge(entry(f"pair {model}", name, median) for name, median in seconds.items())
    found = {outcome.what: (outcome.value, outcome.goal) for outcome in outcomes}
    assert found == {
        "step, dpfuse views / the best peer, DDP view": (pytest.approx(0.9), views),
        "step, dpfuse private / the best peer, DDP view": (pytest.approx(1.1), private),
        "step, dpfuse views / DDP default": (pytest.approx(0.9 / 1.3), None),
        "step, dpfuse private / DDP default": (pytest.approx(1.1 / 1.3), None),
    }


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
    assert values["extra over bare, dpfuse views / the best peer, DDP view"] == (0.25, True)
    assert values["kernels per bucket, dpfuse views"] == (1.0, True)


def test_forwards_and_what_sending_buffers_adds_are_held_against_ddp():
    names = ("dpfuse", "DDP default", "dpfuse, nothing sent", "DDP, nothing sent")

    def measured(case: str) -> list[Entry]:
        extras = dict(zip(names, (0.14, 1.0, 3.0, 4.0), strict=True))
        return [entry(case, name, 1.0, "forward", extra=extra, sending=2 * extra) for name, extra in extras.items()]

    outcomes = judge([*measured("host 53 BatchNorms"), *measured("pair 53 BatchNorms, step")])
    assert {outcome.suite for outcome in outcomes} == {"forward"}
    assert [(outcome.value, outcome.goal) for outcome in outcomes] == [
        (0.14, 0.15), (0.75, None), (0.14, None),
        (0.14, None), (0.75, None), (0.14, 0.15),
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "goal"), [("host 1000", 0.6), ("host 10", None), ("cuda bert_large", 0.4)])
def test_clipping_and_looking_for_nan_are_judged_by_what_they_add_to_packing(case, goal):
    extras = {"bare": 0.0, "dpfuse": 2.0, "dpfuse, below the limit": 1.0, "torch clip + unscale": 10.0}
    measured = [entry(case, name, 1.0, "health", extra=extra) for name, extra in extras.items()]
    clipped, below = judge(measured)
    assert (clipped.value, clipped.goal) == (pytest.approx(0.2), goal)
    assert (below.value, below.goal) == (pytest.approx(0.1), None)


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


@pytest.mark.parametrize(("planned", "met"), [(0.7, True), (0.98, True), (0.99, False)])
def test_the_planned_step_is_held_against_the_best_peer(planned, met):
    outcome = overlap("step, dpfuse planned / the best peer, DDP view", *network(0.4, predicted=0.4, planned=planned))
    assert (outcome.value, outcome.met) == (planned, met)


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


def test_rules_of_other_libraries_are_compared_without_a_goal():
    rule = entry("20 us", "Horovod's rule", 2.0, "overlap")
    outcome = overlap("step, dpfuse planned / Horovod's rule", *network(0.4, predicted=0.4), rule)
    assert (outcome.value, outcome.goal) == (pytest.approx(0.5), None)


@pytest.mark.parametrize(("exposed", "met"), [(0.19, False), (0.21, True)])
def test_a_grid_in_which_nearly_everything_is_hidden_proves_nothing(exposed, met):
    hidden = [entry(f"{part} us", e.variant, e.median, "overlap", **e.info) for part in range(3)
              for e in network(0.1, predicted=0.1)]  # fmt: skip
    outcome = overlap("networks with more than 20% of the step", *hidden, *network(exposed, predicted=0.2))
    assert (outcome.case, outcome.value, outcome.goal) == ("all", float(met), 1.0)
    assert outcome.met is met


def test_without_networks_no_grid_is_judged():
    assert all(
        outcome.suite != "overlap"
        for outcome in judge(host(10, dpfuse_views=3.0, dpfuse_private=4.0, DDP_default=10.0))
    )
