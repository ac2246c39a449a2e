"""Is a training told, in real processes that end, whose ranks train apart because no backward is synchronised?"""

from __future__ import annotations

import re

import pytest

from tests.distributed.processes import SCRIPTS, launch
from tests.loops.test_loops import AT_THE_END, shown

(SHOWN,) = (text for text in shown("DPF-L02") if AT_THE_END in text)
TOLD = re.compile(
    "LoopWarning: " + re.escape(SHOWN).replace(r"rank\ 0", r"rank\ (\d)").replace(r"In\ 30", r"In\ (\d+)"),
)
ENDED = "the training has ended"


def errors_of(ranks, *arguments):
    done = launch("--nproc_per_node", ranks, SCRIPTS / "never_averaged.py", *arguments, warm_ranks=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(ENDED) == ranks, done.stderr
    return done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_end_of_the_process_tells_that_ranks_have_trained_apart(ranks):
    errors = errors_of(ranks, "apart", 30)
    told = TOLD.findall(errors)
    assert {int(rank) for rank, _ in told} == set(range(ranks)), errors
    assert {steps for _, steps in told} <= {"29", "30"}


def test_ranks_of_a_group_compare_with_each_other():
    assert {rank for rank, _ in TOLD.findall(errors_of(3, "last_two", 30))} == {"0", "1"}


def test_a_long_training_is_told_before_its_end():
    errors = errors_of(2, "apart", 300, 40)
    told = [found.start() for found in TOLD.finditer(errors)]
    assert told, errors
    assert min(told) < errors.index(ENDED)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("local_sgd", 30), marks=pytest.mark.slow),
        ("local_sgd", 120, 40),
        ("in_hooks", 30),
        pytest.param(("in_the_step", 30), marks=pytest.mark.slow),
        pytest.param(("same_batches", 30), marks=pytest.mark.slow),
        pytest.param(("one_average", 30), marks=pytest.mark.slow),
        ("apart", 19),
    ],
    ids=str,
)
def test_nothing_is_told_of_ranks_that_had_the_same_weights_or_hardly_trained(arguments):
    assert "DPF-L02" not in errors_of(2, *arguments)
