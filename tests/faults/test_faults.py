"""Every fault on real processes: dpfuse owes the true mean, or an error on every rank that names what it must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from tests.faults.fault import Expected, Fault, Outcome, Verdict, shortfalls
from tests.faults.faults import BY_NAME, FAULTS
from tests.faults.job import DDP, FACES, TORCH
from tests.faults.player import playing
from tests.patience import patience

Futures = dict[tuple[str, str], Future[Verdict]]
# torch's wrapper does the wrong thing here, in as many ways as there are: so the judge is not blind.
WRONG = {
    "model_order": Outcome.CORRUPT,
    "skipped_micro_batch": Outcome.CORRUPT,
    "unused_one_rank": Outcome.LATE,
    "kill_mid_backward": Outcome.UNNAMED,
}


FIRST = ("dpfuse",)
EACH_TIME = dict.fromkeys(("kill_mid_backward", "nan_checked"), (*FIRST, "sharded", "in_backward"))


def plays() -> list[object]:
    """The first face in every run of the tests, and some faults of processes in parts; all others in the long one."""

    def marks(fault: Fault, face: str) -> list[pytest.MarkDecorator]:
        first = face in EACH_TIME.get(fault.name, FIRST)
        return [pytest.mark.slow] if fault.slow or not first else []

    return [
        pytest.param(fault.name, face, marks=marks(fault, face))
        for face in FACES
        if face not in TORCH
        for fault in FAULTS
    ]


@pytest.fixture(scope="module")
def futures(request: pytest.FixtureRequest) -> Iterator[Futures]:
    """The faults whose tests are to run, played two at a time while the tests wait for them in turn."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if "futures" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    ]
    with playing([(BY_NAME[params["name"]], params["face"]) for params in chosen]) as started:
        yield started


def patient(expected: Expected) -> Expected:
    """On a busy machine, every rank knows later."""
    return replace(expected, within=patience(expected.within))


@pytest.mark.parametrize(("name", "face"), plays())
def test_a_fault_is_survived_or_named(futures: Futures, name: str, face: str) -> None:
    verdict = futures[name, face].result()
    print(f"{name}: {verdict.outcome.value} after {verdict.seconds} s")  # shown by pytest -rP
    assert not shortfalls(patient(BY_NAME[name].on(face).expected), verdict)


@pytest.mark.parametrize(("name", "face"), [(name, DDP) for name in WRONG])
def test_the_judge_sees_what_torchs_wrapper_gets_wrong(futures: Futures, name: str, face: str) -> None:
    verdict = futures[name, face].result()
    assert verdict.outcome is WRONG[name], verdict.detail


VALUE = re.compile(r"tensor\(|\d\.\d{4}")


def test_no_error_shows_the_values_of_a_tensor(futures: Futures) -> None:
    """Names, shapes and dtypes are enough; logs are read by more people than data are for."""
    if not futures:
        pytest.skip("no fault was played")
    details = [future.result().detail for (_, face), future in futures.items() if face not in TORCH]
    errors = [line for detail in details for line in detail.splitlines() if "Error: " in line or "dpfuse" in line]
    assert errors
    assert [line for line in errors if VALUE.search(line)] == []
