"""One rank fails at some point of the library in a backward: no rank hangs, dies, or goes on with other gradients.

`python -m tests.distributed.failures.injected` prints what every rank does, point by point.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import pytest

from dpfuse.engine.averaging import averaging_for
from tests.distributed.failures.injected import faults
from tests.distributed.failures.injected.__main__ import row
from tests.distributed.failures.injected.cases import CASES
from tests.distributed.failures.injected.faults import KINDS, Point
from tests.distributed.failures.injected.judge import breaches
from tests.distributed.failures.injected.survey import Survey
from tests.distributed.failures.injected.trial import Fault, Report, Step

SEED = 20261122
ENOUGH = 3  # bad ends after which a test stops: a rank that hangs costs seconds
MEAN = Step(digest="a")


@pytest.fixture(scope="module")
def surveys() -> Iterator[dict[int, Survey]]:
    made = {size: Survey(size) for size in (2, 3)}
    yield made
    for survey in made.values():
        survey.close()


def assert_all_end_well(survey: Survey, planned: Iterable[Fault], enough: int = ENOUGH) -> None:
    rows: list[str] = []
    for fault in planned:
        verdict = survey.run(fault)
        if verdict.breaches:
            rows.append(row(verdict))
        if len(rows) == enough:
            break
    if rows:
        pytest.fail("\n".join(rows), pytrace=False)


QUICK = ("private", "deterministic", "local", "accumulating", "manual")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_failure_on_one_rank_of_two_ends_with_the_mean_or_with_named_errors(surveys, case):
    survey = surveys[2]
    planned = survey.some_faults(case, 3, SEED)
    assert len(planned) >= 2, "a backward without any call of torch may be left out"
    assert_all_end_well(survey, planned)


@pytest.mark.slow
def test_a_failure_on_one_rank_of_three_ends_with_the_mean_or_with_named_errors(surveys):
    survey = surveys[3]
    planned = survey.some_faults("buckets", 4, SEED)
    assert len(planned) == 4
    assert_all_end_well(survey, planned)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "step"), [(name, step) for name, case in CASES.items() for step in case.steps])
def test_every_line_and_every_call_may_fail_on_one_rank_of_two(surveys, case, step):
    survey = surveys[2]
    planned = (fault for kind in KINDS for fault in survey.all_faults(case, step, kind))
    assert_all_end_well(survey, planned, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", CASES["buckets"].steps)
def test_every_line_and_every_call_may_fail_on_one_rank_of_three(surveys, step):
    survey = surveys[3]
    planned = (fault for kind in KINDS for fault in survey.all_faults("buckets", step, kind))
    assert_all_end_well(survey, planned, 10)


def test_the_tracer_raises_at_the_point_that_was_counted():
    counted = faults.Record()
    with faults.failing(counted, "line", None, "RuntimeError"):
        averaging_for("float32", 2)
    assert len(counted.points) > 3
    for at, point in enumerate(counted.points, 1):
        record = faults.Record()
        with pytest.raises(faults.OwnError, match="injected"), faults.failing(record, "line", at, "OwnError"):
            averaging_for("float32", 2)
        assert (record.raised, record.points[-1]) == (True, point)
    assert sys.gettrace() is None


def reports(*steps: list[list[Step]], between: bool = False, collectives: int = 1) -> list[Report]:
    point = Point("engine/bucket.py:1 send", between, collectives)
    return [Report([point] if rank == 0 else [], rank == 0, steps[rank]) for rank in range(len(steps))]


def raised(text: str, *, stage: str = "backward", named: bool = True, chained: bool = False) -> Step:
    return Step(stage, "DPFuseError" if named else "MemoryError", named, text, chained)


OWN = raised("injected", named=False, chained=True)
TOLD = raised("the backward failed on rank 0 of 2")
AGAIN = raised("failed on rank 0 of 2", stage="forward")
ENDED = raised("rank 0 raised within a collective, and rank 1 cannot go on")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (reports([[MEAN], [MEAN]], [[MEAN], [MEAN]]), ""),
        (reports([[OWN, MEAN], [MEAN]], [[TOLD, MEAN], [MEAN]]), ""),
        (reports([[OWN, AGAIN, MEAN], [MEAN]], [[TOLD, MEAN], [MEAN]]), "rank 0: raises 2 times"),
        (reports([[OWN, MEAN], [MEAN]], [[MEAN], [MEAN]], collectives=0), ""),
        (reports([[OWN, ENDED, ENDED]], [[TOLD, ENDED, ENDED]], between=True), ""),
        (reports([[OWN, ENDED, ENDED]], [[TOLD, ENDED, ENDED]]), "no rank can go on"),
        (reports([[OWN, MEAN], [MEAN]], [[MEAN], [MEAN]]), "rank 1 content"),
        (reports([[TOLD, MEAN], [MEAN]], [[TOLD, MEAN], [MEAN]]), "the cause is lost"),
        (reports([[OWN, MEAN], [MEAN]], [[OWN, MEAN], [MEAN]]), "expected a DPFuseError"),
        (reports([[OWN, MEAN], [MEAN]], [[raised("failed on rank 1"), MEAN], [MEAN]]), "does not name rank 0"),
        (reports([[OWN, MEAN], [MEAN]], [[raised(""), MEAN], [MEAN]]), "names no rank"),
        (reports([[OWN, MEAN], [MEAN]], [[TOLD, TOLD, MEAN], [MEAN]]), "rank 1: raises 2 times"),
        (reports([[OWN, MEAN], [MEAN]], [[TOLD, MEAN], [Step(digest="b")]]), "different gradients"),
        (reports([[OWN, MEAN], [MEAN]], [[TOLD, MEAN], [TOLD, MEAN]]), "1 after, rank 1 raises"),
        (reports([[MEAN], [MEAN]], [[Step(digest="a", off=0.5)], [MEAN]]), "off by 0.5"),
        (reports([[OWN, MEAN], [MEAN]], [[TOLD, ENDED, ENDED]]), "only some ranks can go on"),
    ],
)  # fmt: skip
def test_what_counts_as_a_bad_end(given, expected):
    found = "\n".join(breaches(Fault("buckets", 1, 0, at=1), given))
    assert expected in found
    assert bool(expected) == bool(found)
