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
