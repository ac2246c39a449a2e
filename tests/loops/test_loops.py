"""Is each wrong loop named on every rank, with its code, and is nothing said of a right one?"""

from __future__ import annotations

import warnings

import pytest

from dpfuse.errors import DPFuseError, DPFuseWarning
from dpfuse.loop.findings import findings
from tests.loops import right, wrong


def heard(program, rank, size):
    """The codes of what a program was told; an error ends it."""
    findings.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(rank, size)
        except DPFuseError as error:
            if not error.code:
                raise
            return [error.code, str(error)]
    return [
        part
        for each in caught
        if isinstance(each.message, DPFuseWarning)
        for part in (each.message.code, str(each.message))
    ]


def run_wrong(rank, size, names):
    return {name: heard(wrong.PROGRAMS[name][1], rank, size) for name in names}


def run_right(rank, size, names):
    return {name: heard(right.PROGRAMS[name], rank, size) for name in names}


CODES = sorted({code for code, _ in wrong.PROGRAMS.values()})


@pytest.mark.parametrize("code", CODES)
def test_each_wrong_loop_is_named_on_every_rank(ranks, code):
    names = [name for name, (own, _) in wrong.PROGRAMS.items() if own == code]
    told = ranks(run_wrong, names, timeout=60)
    assert {name: [one[name][:1] for one in told] for name in names} == {name: [[code]] * len(told) for name in names}


def test_nothing_is_said_of_right_loops(ranks):
    assert ranks(run_right, [*right.PROGRAMS], timeout=60) == [{name: [] for name in right.PROGRAMS}] * 2
