"""Differences planted into one of two trainings: the first step, rank and cause are found, for both wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfuse.trace.comparison import compare
from dpfuse.trace.trace_file import read_folder
from tests.one_in import crossed
from tests.trace.training import PLAIN_HOOK, PLANTS, settings_of, train


def both(rank: int, size: int, folder: Path, wrap: str, name: str) -> None:
    cause, _, _, plant = PLANTS[name]
    train(folder / "healthy", wrap, PLAIN_HOOK if cause == "communication" else None)
    with settings_of(name):
        train(folder / "planted", wrap, plant)


def found_in(folder: Path):
    return compare(read_folder(folder / "healthy"), read_folder(folder / "planted"))


@pytest.mark.parametrize(
    ("name", "wrap"), crossed(3, {name: name for name in PLANTS}, {"dpfuse": "dpfuse", "torch": "torch"})
)
def test_the_first_difference_is_found(name, wrap, ranks, tmp_path):
    ranks(both, tmp_path, wrap, name)
    cause, step, rank, _ = PLANTS[name]
    found = found_in(tmp_path)
    assert (found.cause, found.step, found.rank) == (cause, step, rank), found.explain()


def healthy(rank: int, size: int, folder: Path, first: str, second: str) -> None:
    train(folder / "healthy", first)
    train(folder / "planted", second)


@pytest.mark.parametrize(("first", "second"), [("dpfuse", "dpfuse"), ("torch", "torch"), ("dpfuse", "torch")])
def test_equal_runs_are_equal_and_dpfuse_equals_ddp_on_two_ranks(first, second, ranks, tmp_path):
    ranks(healthy, tmp_path, first, second)
    assert found_in(tmp_path) is None


def test_thirty_are_planted_in_every_class():
    assert len(PLANTS) >= 30
    assert {cause for cause, *_ in PLANTS.values()} == {
        "settings",
        "random state",
        "data",
        "kernel",
        "communication",
        "optimizer",
    }
