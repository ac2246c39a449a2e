"""Means that a program takes by hand, on two ranks: which are named, and which are those of something else."""

from __future__ import annotations

import re
from itertools import product

import pytest

from dpfuse.commands.doctor.findings import findings_of
from dpfuse.commands.doctor.runs import RunSetup, run_once
from dpfuse.commands.run_command import Program
from tests.commands.doctor.cases import AGAIN, MEANS, PLANTED, TWICE
from tests.commands.programs import PROGRAMS
from tests.distributed.processes import clean_environment

SAID = {case.program.split()[1]: case.said for case in PLANTED if case.kind == "means"}


def found_in(name, wrapper, folder, monkeypatch):
    """What is found in one run of a program of two ranks."""
    for variable, value in clean_environment(OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(variable, value)
    setup = RunSetup(Program(str(PROGRAMS / "means.py"), (name,)), 2, False, 8, 2, 60.0, folder)
    run = run_once(setup, 1, wrapper, lambda text: None)
    assert (run.code, run.steps) == (0, 8), run.log.read_text()
    return findings_of([run])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*product(AGAIN, ("torch", "dpfuse"))])
def test_a_mean_that_the_backward_has_taken_already_is_named_with_its_line(case, tmp_path, monkeypatch):
    (found,) = found_in(*case, tmp_path, monkeypatch)
    assert (found.title, found.step) == (TWICE, 1)
    assert re.match(SAID[case[0]], f"{found.title}: {found.text}"), found.text


@pytest.mark.slow
@pytest.mark.parametrize("case", [*product(MEANS, ("torch", "dpfuse"))])
def test_a_mean_of_something_else_is_left_alone(case, tmp_path, monkeypatch):
    assert found_in(*case, tmp_path, monkeypatch) == ()
