"""Each program whose weights differ for good is told of, once, on every rank."""

from __future__ import annotations

import pytest

from tests.one_in import one_in
from tests.weights import right_programs
from tests.weights.wrong_programs import PROGRAMS


def run_wrong(rank: int, size: int, name: str) -> list[str]:
    """Run a program, and return the codes that it was told."""
    return [text.partition(":")[0] for text in right_programs.run_program(PROGRAMS[name], rank, size)]


@pytest.mark.parametrize("name", one_in(4, PROGRAMS))
def test_it_is_told(ranks, name):
    assert ranks(run_wrong, name) == [["DPF-W01"], ["DPF-W01"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_told_on_three_ranks(ranks, name):
    assert ranks(run_wrong, name, size=3) == [["DPF-W01"]] * 3
