"""The health suite proves both ways equal before it times them, and times what it says."""

from __future__ import annotations

import pytest
import torch

from bench import bench_health
from bench.bench_health import OURS, VARIANTS, time_health
from bench.goals import Entry, judge
from bench.rank_group import on_ranks
from bench.step_time import Effort

SHAPES = [(3, 5), (7,), (40, 30)]


def test_every_contender_is_timed_and_judged():
    results = on_ranks(1, "cpu", time_health, SHAPES, Effort(3, 1, 0), "cpu")
    assert tuple(results) == VARIANTS
    assert all(len(result["seconds"]) == 3 for result in results.values())
    assert results[OURS]["facts"]["bytes"] == 4 * (15 + 7 + 1200)
    entries = [Entry("health", "host 1000", name, 1.0, 0.0, 0.0, 3, dict(result)) for name, result in results.items()]
    assert len(judge(entries)) == 3


def broken_norm(health, limit=None):
    return bench_health._Health.torchs(health) * 1.01


def blind(self, now):
    return None


def test_a_wrong_norm_or_an_unseen_nan_is_found_before_anything_is_timed(monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="the norms differ"):
        patched.setattr(bench_health._Health, "ours", broken_norm)
        on_ranks(1, "cpu", time_health, SHAPES, Effort(1, 1, 0), "cpu")
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="a NaN was not seen"):
        patched.setattr(bench_health.FiniteCheck, "text", blind)
        on_ranks(1, "cpu", time_health, SHAPES, Effort(1, 1, 0), "cpu")
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="not close"):
        patched.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", lambda grads, *_: grads[0].mul_(2))
        patched.setattr(bench_health.math, "isclose", lambda *args, **options: True)
        on_ranks(1, "cpu", time_health, SHAPES, Effort(1, 1, 0), "cpu")
