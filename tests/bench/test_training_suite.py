"""The benchmark of the checks of a training: its contenders differ in nothing but these."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import dpfuse
from bench.bench_training import CALLS, ROUND, SETTLED, WRAPS, time_training
from bench.goals import Entry, judge
from bench.models import chain
from bench.step_time import Effort
from dpfuse.loop.compared_words import is_due
from dpfuse.weights.hashing import Hashing


def test_each_contender_is_timed_for_a_whole_round(rank: int, size: int) -> None:
    results = time_training(partial(chain, 3), Effort(2, 1, 0), backwards=2, steps=3)
    assert list(results) == [*WRAPS, CALLS]
    # Of the journal each forward, begin and end of a backward, and after each step. Of loops before each step, words.
    # Of weights each end of an averaged backward, and after each step.
    assert 10 <= results[CALLS]["facts"]["calls"] <= 24
    assert all(len(result["seconds"]) == 2 and result["wall"] > 0 for result in results.values())
    assert results["not checked"]["extra"] == 0


def test_a_round_begins_after_the_first_comparisons_and_has_two_later_ones() -> None:
    assert [sum(map(is_due, range(start, start + ROUND))) for start in (SETTLED, SETTLED + ROUND)] == [2, 2]


def test_in_a_round_all_weights_of_the_models_are_hashed() -> None:
    for count, steps in ((10, ROUND), (100, ROUND), (1000, 2 * ROUND)):
        module = chain(count).module
        assert Hashing(dict(module.named_parameters()), {}, torch.device("cpu")).slices <= steps


def test_only_one_contender_checks(rank: int, size: int) -> None:
    checked, other = (dpfuse.DataParallel(chain(3).module, check_training=level) for level in ("raise", "off"))
    assert None not in (checked._sync.loop, checked._sync.weights)
    assert (other._sync.loop, other._sync.weights, other._sync.journal) == (None, None, None)


@pytest.mark.parametrize(
    ("case", "extra", "met"),
    [
        ("10 parameters", 9.9e-6, True),
        ("10 parameters", 10.1e-6, False),
        ("1000 parameters", 39e-6, True),
        ("1000 parameters", 41e-6, False),
        ("step of 5 ms", 4.9e-6, True),
        ("step of 5 ms", 5.1e-6, False),
    ],
)
def test_the_goals_are_times_in_the_calls_and_a_part_of_a_step(case: str, extra: float, met: bool) -> None:
    entries = [
        Entry("training", case, name, 1e-3, 1e-3, 0.0, 1, {"extra": extra if name == CALLS else 0.0})
        for name in (*WRAPS, CALLS)
    ]
    assert [outcome.met for outcome in judge(entries)] == [None, met]
