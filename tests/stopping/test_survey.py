"""Trainings that get a signal at some moment, and go on: some of the sixty of `tests.stopping.survey`."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest

from tests.stopping.survey.judge import faults_of
from tests.stopping.survey.trials import TRIALS

PACKAGES = {"lightning": "lightning", "trainer": "transformers"}
KINDS = [trial.kind for trial in TRIALS]
# One sharded and one plain training are run by `make test-all`.
MARKS = dict.fromkeys((KINDS.index("sharded"), KINDS.index("plain")), (pytest.mark.slow,))
NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.parametrize("name", ["kind", "ranks", "rest", "workers", "number", "target", "moment", "step", "source"])
def test_each_value_occurs_at_least_five_times(name):
    assert min(Counter(getattr(trial, name) for trial in TRIALS).values()) >= 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "trial",
    [pytest.param(trial, marks=MARKS.get(place, NIGHTLY), id=f"{place}") for place, trial in enumerate(TRIALS)],
)
def test_all_ranks_stop_in_one_step_and_the_rest_goes_on_rightly(trial):
    package = PACKAGES.get(trial.kind)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-nightly` does it")
    assert faults_of(trial) == [], trial
