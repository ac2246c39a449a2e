"""The benchmark of the comparison of weights: its contenders differ in nothing but the comparison."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import dpfuse
from bench.bench_weights import CALLS, METHODS, PASS, WRAPS, time_weights
from bench.goals import Entry, judge
from bench.models import chain
from bench.step_time import Effort
from dpfuse.weights.hashing import Hashing


def test_each_contender_is_timed_for_a_whole_pass(rank: int, size: int) -> None:
    results = time_weights(partial(chain, 3), Effort(2, 1, 0))
    assert list(results) == [*WRAPS, CALLS]
    assert results[CALLS]["facts"]["calls"] == len(METHODS)
    assert all(len(result["seconds"]) == 2 and result["wall"] > 0 for result in results.values())
    assert results["not compared"]["extra"] == 0


def test_a_pass_has_the_steps_in_which_all_weights_of_the_models_are_hashed() -> None:
    for count in (10, 100):
        module = chain(count).module
        assert Hashing(dict(module.named_parameters()), {}, torch.device("cpu")).slices == PASS


def test_only_one_contender_compares(rank: int, size: int) -> None:
    compared, other = (dpfuse.DataParallel(chain(3).module, check_weights=level) for level in ("raise", "off"))
    assert compared._sync.weights is not None
    assert other._sync.weights is None


@pytest.mark.parametrize(("extra", "met"), [(9e-6, True), (11e-6, False)])
def test_the_goal_is_a_hundredth_of_the_step(extra: float, met: bool) -> None:
    entries = [
        Entry("weights", "10 parameters", name, 1e-3, 1e-3, 0.0, 1, {"extra": extra if name == CALLS else 0.0})
        for name in (*WRAPS, CALLS)
    ]
    assert [outcome.met for outcome in judge(entries)] == [None, met]
