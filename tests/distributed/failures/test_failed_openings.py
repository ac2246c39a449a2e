"""A backward of one rank raises at some line of the library: the peers do not pair theirs with its next one.

`python -m tests.distributed.failures.opening` prints what every rank does, line by line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import pytest
import torch

from tests.distributed.failures.opening.lines import Passed
from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.survey import STEPS, Survey, row
from tests.distributed.failures.opening.trial import Fault, Step, Told, breaches

ENOUGH = 3  # bad ends after which a test stops


@pytest.fixture(scope="module")
def survey() -> Iterator[Survey]:
    made = Survey()
    yield made
    made.close()


def assert_all_end_well(survey: Survey, faults: Iterable[Fault]) -> None:
    verdicts = (survey.run(fault) for fault in faults)
    rows = [row(verdict) for verdict in islice((each for each in verdicts if each.breaches), ENOUGH)]
    if rows:
        pytest.fail("\n".join(rows), pytrace=False)


@pytest.mark.parametrize("step", STEPS)
def test_no_rank_goes_on_alone_after_a_backward_that_failed_before_its_first_collective(survey, step):
    planned = list(survey.faults("views", step, every=True))
    assert len(planned) > 100
    assert_all_end_well(survey, planned[:40:8] + planned[step :: len(planned) // 6])


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "views"])
def test_neither_in_other_programs(survey, program):
    planned = list(survey.faults(program, 4, every=True))
    assert_all_end_well(survey, [planned[0], planned[len(planned) * 2 // 3]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PROGRAMS)
def test_neither_at_any_line_before_the_last_collective(survey, program):
    for step in STEPS:
        # After the first backward an interrupt of the vote on the buckets ends the group, which takes seconds.
        assert_all_end_well(survey, survey.faults(program, step, last=step > 1))


def told(*errors: str, shift: int = 0, digest: str = "a") -> Told:
    failed = [Step(number, "Error", error != "planted", error) for number, error in enumerate(errors)]
    first = len(errors) + shift
    grads = [torch.zeros(1)] * 7
    good = [Step(first + number, digest=digest, grads=grads) for number in range(3)]
    return Told([*failed, *good], Passed())


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([told("planted", "rank 0 failed"), told("rank 0 failed", shift=1)], ""),
        ([told("planted"), told(shift=0)], "one rank goes on"),
        ([told("planted", "failed"), told("rank 0 failed", shift=1)], "unnamed"),
        ([told("planted", "rank 0", "rank 0"), told("rank 0", shift=2)], "3 errors"),
        ([told(), told(digest="b")], "different gradients"),
    ],
)
def test_what_counts_as_a_bad_end(ranks, expected):
    found = "; ".join(breaches(Fault("sharded", 0, 1), ranks))
    assert expected in found
    assert bool(expected) == bool(found)
