"""Delays on real ranks over gloo: are the rank and the phase named in time, and is nothing said of healthy runs?

`python -m bench.slow_ranks` plays all cases, and writes the record.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench.slow_ranks import DELAYED, Case, found, play

pytestmark = pytest.mark.timeout(600)


def played(rank, size, *cases):
    return play([asdict(case) for case in cases])


@pytest.mark.parametrize(
    ("size", "phase"),
    [
        (2, "forward"),
        (3, "loader"),
        *(
            pytest.param(size, phase, marks=pytest.mark.slow)
            for size in (2, 3, 4)
            for phase in DELAYED
            if (size, phase) not in ((2, "forward"), (3, "loader"))
        ),
    ],
)
def test_a_delay_of_a_fifth_of_a_step_is_attributed(ranks, size, phase):
    ((result,), *others) = ranks(played, Case(phase, size - 1), size=size, timeout=120)
    assert found(result), result
    assert result["numbers"]["late_rank"] == size - 1
    assert all(other["heard"] == [] and other["numbers"] == {} for (other,) in others)


@pytest.mark.slow
def test_nothing_is_said_of_healthy_runs(ranks):
    ((*results,), *_) = ranks(played, *(Case(seed=seed) for seed in range(5)), size=3, timeout=300)
    assert [result["heard"] for result in results] == [[]] * 5
