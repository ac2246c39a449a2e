"""Nothing is told of programs that are right."""

from __future__ import annotations

import pytest

from tests.one_in import one_in
from tests.weights.right_programs import PROGRAMS, run


@pytest.mark.parametrize("name", one_in(6, PROGRAMS))
def test_nothing_is_told(ranks, name):
    assert ranks(run, name, size=2) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_told_on_three_ranks(ranks, name):
    assert ranks(run, name, size=3) == [[], [], []]
