"""The benchmark of the check of the loop: its contenders differ in nothing but the check."""

from __future__ import annotations

from functools import partial

import pytest

import dpfuse
from bench.bench_loop import CALLS, ROUND, SETTLED, WRAPS, time_loop
from bench.goals import Entry, judge
from bench.models import chain
from bench.step_time import Effort
from dpfuse.loop.changed_gradients import STEPS
from dpfuse.loop.rank_words import is_due


def test_each_contender_is_timed_for_a_whole_round(rank: int, size: int) -> None:
    results = time_loop(partial(chain, 3), Effort(2, 1, 0), backwards=2, steps=3)
    assert list(results) == [*WRAPS, CALLS]
    # Of each backward its begin and end, of each step the hook before it. Of some also the forward, and the words.
    assert 2 * 2 + 1 <= results[CALLS]["facts"]["calls"] <= 3 * 2 + 2
    assert all(len(result["seconds"]) == 2 and result["wall"] > 0 for result in results.values())
    assert results["not checked"]["extra"] == 0


def test_a_round_begins_behind_the_first_comparisons_and_has_two_later_ones() -> None:
    assert STEPS < SETTLED
    assert [sum(map(is_due, range(start, start + ROUND))) for start in (SETTLED, SETTLED + ROUND)] == [2, 2]


def test_only_one_contender_checks(rank: int, size: int) -> None:
    checked, other = (dpfuse.DataParallel(chain(3).module, check_loop=level) for level in ("raise", "off"))
    assert checked._sync.loop is not None
    assert other._sync.loop is None


@pytest.mark.parametrize(("extra", "met"), [(4.9e-6, True), (5.1e-6, False)])
def test_the_goal_is_a_time_that_does_not_grow_with_the_parameters(extra: float, met: bool) -> None:
    for case in ("10 parameters", "1000 parameters"):
        entries = [
            Entry("loop", case, name, 1e-3, 1e-3, 0.0, 1, {"extra": extra if name == CALLS else 0.0})
            for name in (*WRAPS, CALLS)
        ]
        assert [outcome.met for outcome in judge(entries)] == [None, met]
