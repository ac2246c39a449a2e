"""The doctor on programs with one thing wrong, and on right ones; `python -m tests.commands.doctor` keeps a record."""

from __future__ import annotations

import pytest

from tests.commands.doctor.cases import HEALTHY, PLANTED, examine

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_what_is_planted_is_told_and_named_on_the_terminal(case, tmp_path):
    diagnosis = examine(case, tmp_path)
    assert not diagnosis.complaints, diagnosis.terminal


@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_nothing_is_named_in_a_healthy_program(case, tmp_path):
    diagnosis = examine(case, tmp_path)
    assert not diagnosis.complaints, diagnosis.terminal


def test_there_are_thirty_planted_programs_and_fifteen_healthy_ones_on_two_and_on_three_ranks():
    kinds = [case.kind for case in PLANTED]
    least = {"loop": 12, "finite": 2, "drift": 6, "link": 4, "numbers": 4, "itself": 4}
    assert all(kinds.count(kind) >= count for kind, count in least.items())
    assert all(sum(case.ranks == ranks for case in HEALTHY) >= 15 for ranks in (2, 3))
