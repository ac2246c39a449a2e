"""The benchmark of fixed micro-batches: all contenders average the same mean, and each deal has its goal."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from bench.bench_same_bits import CONTENDERS, _Contender, _prove, measure_steps
from bench.goals import Entry, judge
from bench.models import layers
from bench.step_time import Effort


def few_steps(rank: int, size: int, count: int) -> None:
    seconds = measure_steps(partial(layers, 3, 16), count, Effort(2, 2, 0))
    assert list(seconds) == list(CONTENDERS)
    assert all(len(each) == 4 for each in seconds.values())


@pytest.mark.parametrize("count", [2, 5])
def test_contenders_are_proved_and_timed(ranks, count):
    ranks(few_steps, count)


@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_a_contender_with_another_mean_is_not_timed(error):
    param, mean = nn.Parameter(torch.zeros(3)), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def step() -> None:
        param.grad = torch.tensor([1.0, 2.0 + 3 * error, 3.0])

    contender = _Contender([param], step)
    if error:
        with pytest.raises(AssertionError, match="wrong one"):
            _prove("wrong one", contender, mean)
    else:
        _prove("right one", contender, mean)
        assert param.grad is None


@pytest.mark.parametrize(("case", "goal"), [("2 on 2 ranks, CNN", 1.05), ("8 on 3 ranks, 25 MB large", 1.1)])
@pytest.mark.parametrize("times", [1.0, 1.2])
def test_the_medians_are_held_against_the_same_deal_in_rank_order(case, goal, times):
    medians = {"fixed": times, "deterministic": 1.0, "default": 0.5}
    entries = [Entry("same_bits", case, name, median, 0.4, 0.0, 5, {}) for name, median in medians.items()]
    first, fastest, default = judge(entries)
    assert (first.value, first.goal, first.met) == (times, goal, times < goal)
    assert (fastest.value, fastest.met) == (1.0, None)
    assert (default.value, default.met) == (2 * times, None)
