"""How fast, and where the time of a step goes, from traces whose times are known."""

from __future__ import annotations

import pytest

from dpfuse.commands.doctor.speed import measure
from dpfuse.tune import CostTable
from tests.commands.doctor.made import plain_facts, timed

PARTS = {"loader": 0.01, "forward": 0.02, "backward": 0.05, "optimizer": 0.01, "outside": 0.01}


def test_steps_and_parts_leave_tracing_out():
    slower = {**PARTS, "backward": 0.15}
    found = measure([timed(1, "torch", **slower), timed(2, "dpfuse", **PARTS), timed(3, "torch", **slower)], deep=2)
    assert found.ratio == pytest.approx(0.5)
    assert found.noise == pytest.approx(0.0)
    assert [len(one.steps) for one in found.timings] == [10, 10, 10]
    assert found.timings[1].median == pytest.approx(0.1)
    assert found.timings[1].parts == pytest.approx({**PARTS, "device": 0.0})
    assert found.timings[1].waiting == 0.0
    assert found.link is None
    assert found.advice == ()


def test_noise_is_what_runs_of_one_kind_differ_by():
    runs = [timed(1, "torch", backward=0.1), timed(2, "dpfuse", backward=0.1), timed(3, "torch", backward=0.12)]
    assert measure(runs, deep=2).noise == pytest.approx(0.2)


def test_a_slow_rank_is_named_and_what_the_others_wait():
    found = measure([timed(1, "torch", busy=(0.0, 0.04), **PARTS), timed(2, "dpfuse", **PARTS)], deep=2)
    slowest = found.timings[0].slowest
    assert (slowest.rank, slowest.part, slowest.seconds) == (1, "forward", pytest.approx(0.04))
    assert slowest.explain() == "rank 1 is the slowest in most steps, by 40 ms in its forward"
    assert found.timings[0].waiting == pytest.approx(0.02)  # the mean over both ranks
    assert found.timings[1].slowest is None


def test_too_few_steps_say_nothing():
    found = measure([timed(1, "torch", steps=6, **PARTS), timed(2, "dpfuse", steps=6, **PARTS)], deep=2)
    assert (found.timings, found.ratio) == ((), None)


def test_two_optimizers_make_one_step_of_the_program():
    run = timed(1, "torch", steps=24, **PARTS)
    for trace in run.traces.values():
        for number, line in enumerate(trace.steps):
            line["optimizer"] = number % 2
    assert measure([run], deep=2).timings[0].median == pytest.approx(0.2)


@pytest.mark.parametrize(("exposed", "limit", "advised"), [(0.001, False, 0), (0.01, False, 2), (0.04, True, 2)])
def test_the_link_and_what_would_help(exposed, limit, advised):
    run = timed(2, "dpfuse", **PARTS)
    sums = {"steps": 10, "collectives": 20, "nbytes": 10 * 4e6, "seconds": 10 * 0.05, "exposed": 10 * exposed}
    run.facts["0"] = plain_facts(communication=[sums])
    found = measure([timed(1, "torch", **PARTS), run], deep=2)
    assert found.link.is_the_limit == limit
    assert "4 MB in 2 messages per step, 80 MB/s while a bucket travels" in found.link.explain()
    assert len(found.advice) == advised
    assert all(one.step == pytest.approx(0.1 - exposed / 2) for one in found.advice)


def test_short_messages_are_not_advised_to_be_shorter():
    run = timed(2, "dpfuse", **PARTS)
    sums = {"steps": 10, "collectives": 20, "nbytes": 10 * 4e3, "seconds": 0.5, "exposed": 0.4}
    run.facts["0"] = plain_facts(communication=[sums])
    found = measure([run], deep=2)
    assert found.link.explain().endswith("the link is the limit, by its latency")
    assert [one.what for one in found.advice] == ["average every second batch, or double the batch"]


@pytest.mark.parametrize(
    ("tuning", "text"),
    [
        ({"done": True, "kept": True, "error": "", "before": 0.1, "after": 0.08}, "20% shorter"),
        ({"done": True, "kept": False, "error": "", "before": 0.1, "after": 0.1}, "as good as those"),
        ({"done": True, "kept": False, "error": "", "before": 0.1, "after": None}, "as good as those"),
        ({"done": False, "kept": False, "error": "", "before": None, "after": None}, ""),
        ({"done": True, "kept": False, "error": "no link", "before": None, "after": None}, "changed nothing: no link"),
    ],
)
def test_what_the_tuner_found(tuning, text):
    run = timed(5, "tuned", **PARTS)
    run.facts["0"] = plain_facts(tunings=[{"cost": None, **tuning}])
    found = measure([run], deep=2)
    assert found.timings == ()
    assert text in found.tuned
    assert bool(text) == bool(found.tuned)


@pytest.mark.parametrize(("latency", "rate", "is_latency"), [(0.02, 1e9, True), (1e-4, 5e6, False)])
def test_whether_the_latency_is_the_limit_is_what_the_tuner_has_measured(latency, rate, is_latency):
    run, tuned = timed(2, "dpfuse", **PARTS), timed(5, "tuned", **PARTS)
    sums = {"steps": 10, "collectives": 10, "nbytes": 10 * 100e3, "seconds": 0.2, "exposed": 0.4}
    run.facts["0"] = plain_facts(communication=[sums])
    cost = CostTable.affine(latency, rate).to_json()
    tuning = {"done": True, "kept": False, "error": "", "before": 0.1, "after": None, "cost": cost}
    tuned.facts["0"] = plain_facts(tunings=[tuning])
    found = measure([run, tuned], deep=2)
    assert found.link.is_latency == is_latency
    assert ("send 16 bits" in [one.what for one in found.advice]) != is_latency


def test_the_part_of_a_step_that_waits_is_one_of_means():
    """On a busy machine a few steps take long, and the median would be less than what is waited for."""
    run = timed(2, "dpfuse", **PARTS)
    for trace in run.traces.values():
        trace.steps[-1] = {**trace.steps[-1], "times": {**trace.steps[-1]["times"], "backward": 2.0}}
    sums = {"steps": 10, "collectives": 10, "nbytes": 1e6, "seconds": 2.2, "exposed": 2.2}
    run.facts["0"] = plain_facts(communication=[sums])
    found = measure([run], deep=2)
    assert found.link.exposed < found.link.step
