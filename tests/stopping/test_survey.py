"""Trainings that get a signal at some moment, and go on: some of the sixty of `tests.stopping.survey`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.stopping.survey.judge import faults_of
from tests.stopping.survey.trials import TRIALS

USUAL = [place for place, trial in enumerate(TRIALS) if trial.kind in ("plain", "sharded")]
QUICK = USUAL[:2]


@pytest.mark.parametrize("name", ["kind", "ranks", "rest", "workers", "number", "target", "moment", "step", "source"])
def test_each_value_occurs_at_least_five_times(name):
    assert min(Counter(getattr(trial, name) for trial in TRIALS).values()) >= 5


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "number",
    [
        number if number in QUICK else pytest.param(number, marks=(pytest.mark.slow, pytest.mark.nightly))
        for number in USUAL
    ],
)
def test_all_ranks_stop_in_one_step_and_the_rest_goes_on_rightly(number):
    assert faults_of(TRIALS[number]) == [], TRIALS[number]
