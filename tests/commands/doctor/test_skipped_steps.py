"""Steps that a GradScaler skips: a count, and a finding where they are too many."""

from __future__ import annotations

import pytest

from dpfuse.commands.doctor.findings import findings_of
from dpfuse.commands.doctor.page import page
from dpfuse.commands.doctor.summary import summary
from tests.commands.doctor.made import plain_facts, timed, traces_of, window
from tests.commands.doctor.test_report import report


def scaled(made, number=1):
    run = timed(number, "torch", forward=0.1)
    facts = plain_facts(scaled=[{"optimizer": "Adam", "made": made}])
    run.facts = {"0": facts, "1": facts}
    return run


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([True] * 20, False),
        ([True] * 30 + [False] * 10, True),  # the last ten
        ([True] * 31 + [False] * 9, False),
        ([False] * 10 + [True] * 30, False),  # a quarter
        ([False] * 11 + [True] * 29, True),
        ([False] * 5, True),
    ],
)
def test_a_quarter_of_the_steps_may_be_skipped_but_not_the_last_ten(made, told):
    assert [one.title for one in findings_of([scaled(made)])] == ["a GradScaler skips steps"] * told


def test_a_few_skipped_steps_are_a_count_and_no_finding():
    made = report(runs=[scaled([False] + [True] * 49, number) for number in (1, 2)])
    words = "he GradScaler skipped 1 of 50 steps of Adam"
    assert f"what is wrong?   nothing was found\nskipped          t{words}\n" in summary(made)
    assert f"<p>T{words}.</p>" in page(made)
    assert made.to_json()["skipped steps"] == [{"optimizer": "Adam", "steps": 50, "skipped": 1, "at_end": 0}]
    assert "skipped" not in summary(report(runs=[scaled([True] * 50)]))


def test_too_many_are_told_with_the_first_gradient_that_was_not_finite():
    run = scaled([True, False] * 10)
    run.traces = traces_of(*[window("aa") for _ in range(10)])
    run.traces[1].steps[2]["backwards"][0]["not finite"] = {"0": [1]}
    (found,) = findings_of([run])
    assert "the GradScaler skipped 10 of 20 steps of Adam, since gradients were not finite" in found.text
    assert "; first the gradient of bias on rank 1, before step 2." in found.text
    told = summary(report(findings=[found], runs=[scaled([True, False] * 10)]))
    assert "what is wrong?   a GradScaler skips steps: the GradScaler skipped 10 of 20" in told
    assert "\nskipped  " not in told  # it is told once


def test_a_run_that_has_failed_says_nothing_of_its_few_steps():
    run = scaled([False, True])
    run.code = 1
    assert findings_of([run]) == ()
