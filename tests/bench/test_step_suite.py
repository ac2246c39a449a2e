"""The suite of steps: every contender is proved, counted and timed."""

from __future__ import annotations

from functools import partial

from bench.baselines import wrappers
from bench.bench_step import LOCAL, _pair_contenders
from bench.models import chain
from bench.step_time import Effort, time_steps


def test_every_contender_is_timed_on_two_ranks(rank: int, size: int) -> None:
    results = time_steps(partial(chain, 3), _pair_contenders(), effort=Effort(2, 1, 0))
    assert list(results) == list(_pair_contenders())
    assert all(len(result["seconds"]) >= 2 and result["wall"] > 0 for result in results.values())
    counted = {name for name, result in results.items() if "buckets" in result["facts"]}
    assert counted == {name for name in results if name.startswith("dpfuse")}


def test_contenders_without_peers_are_timed_inside_no_sync(group: None) -> None:
    wraps = {name: wrap for name, wrap in wrappers().items() if name in LOCAL}
    results = time_steps(partial(chain, 3), wraps, effort=Effort(2, 1, 0), no_sync=True)
    assert set(results) == set(LOCAL)
