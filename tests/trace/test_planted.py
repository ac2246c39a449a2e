"""Differences planted into one of two trainings: the first step, rank and cause are found, for both wrappers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from dpfuse.trace.comparison import compare
from dpfuse.trace_file import BEFORE_STEP, HOOKED, RankTrace, read_folder
from tests.trace.training import BATCHES, MICRO, PLAIN_HOOK, PLANTS, settings_of, train


def both(rank: int, size: int, folder: Path, wrap: str, name: str) -> None:
    cause, _, _, plant = PLANTS[name]
    train(folder / "healthy", wrap, PLAIN_HOOK if cause == "communication" else None)
    with settings_of(name):
        train(folder / "planted", wrap, plant)


def found_in(folder: Path):
    return compare(read_folder(folder / "healthy"), read_folder(folder / "planted"))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("wrap", ["dpfuse", "torch"])
@pytest.mark.parametrize("name", PLANTS)
def test_the_first_difference_is_found(name, wrap, ranks, tmp_path):
    ranks(both, tmp_path, wrap, name)
    cause, step, rank, _ = PLANTS[name]
    found = found_in(tmp_path)
    assert (found.cause, found.step, found.rank) == (cause, step, rank), found.explain()
    if name in BATCHES:
        batch = BATCHES[name]
        assert found.batch == (None if batch is None else (batch, MICRO)), found.explain()
        assert (f", micro-batch {batch} of {MICRO}, rank {rank}" in found.explain()) == (batch is not None)


def healthy(rank: int, size: int, folder: Path, first: str, second: str) -> None:
    train(folder / "healthy", first)
    train(folder / "planted", second)


@pytest.mark.parametrize(("first", "second"), [("dpfuse", "dpfuse"), ("torch", "torch"), ("dpfuse", "torch")])
def test_equal_runs_are_equal_and_dpfuse_equals_ddp_on_two_ranks(first, second, ranks, tmp_path):
    ranks(healthy, tmp_path, first, second)
    assert found_in(tmp_path) is None


def hooked(rank: int, size: int, folder: Path) -> None:
    for name, wrap in (("healthy", "dpfuse"), ("planted", "torch")):
        train(folder / name, wrap, with_hooks)


def halve(param):
    param.grad.mul_(0.5)


def with_hooks(point, run, value):
    if point == "weights":
        run.net.first.weight.register_post_accumulate_grad_hook(halve)
    if point == "wrapped":
        run.net.last.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    return value


def test_dpfuse_equals_ddp_where_hooks_change_gradients(ranks, tmp_path):
    ranks(hooked, tmp_path)
    assert found_in(tmp_path) is None


def logged(rank: int, size: int, folder: Path) -> None:
    for name, wrap in (("healthy", "dpfuse"), ("planted", "torch")):
        train(folder / name, wrap, with_a_log, bucket_cap_mb=0.0005)


def norm_of_gradient(param):
    param.grad.norm()


def with_a_log(point, run, value):
    if point == "wrapped":
        for param in run.net.parameters():
            param.register_post_accumulate_grad_hook(norm_of_gradient)
    if point == "before step":  # so that gradients stay in the buckets, which are sent while backward runs
        run.optimizer.zero_grad = partial(torch.optim.AdamW.zero_grad, run.optimizer, set_to_none=False)
    return value


def test_what_dpfuse_does_to_a_gradient_before_a_hook_that_reads_it_is_no_change_by_the_program(ranks, tmp_path):
    ranks(logged, tmp_path)
    assert found_in(tmp_path) is None


def test_of_models_that_differ_in_one_backward_the_first_one_is_named():
    of_model = {"class": "Net", "wrapper": "torch", "names": ["weight"], "shapes": [], "dtypes": [], "parameters": ""}
    models = [{"number": number, **of_model} for number in range(12)]
    one, other = (
        {0: RankTrace({}, models, [], [{"forwards": [], "backwards": [{"averaged": averaged}]}])}
        for averaged in ({str(number): letter * 8 for number in reversed(range(12))} for letter in "ab")
    )
    assert compare(one, other).model == 0


def read_as_older(folder: Path):
    """Read a trace as earlier versions wrote it: they read no hooks, and weights only when the first forward began."""
    traces = read_folder(folder)
    for line in (line for trace in traces.values() for line in trace.steps):
        del line[BEFORE_STEP]
        for one in line["forwards"][1:]:
            del one["weights"]
        for one in line["backwards"]:
            del one[HOOKED]
    return traces


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("a_hook_on_rank_1", "communication"),  # of what is in the older one, the average differs first
        ("weights_written_between_batches", "forward"),
        ("weights_written_before_the_step", "optimizer"),
        ("weights_changed_between_steps", "written"),
    ],
)
def test_a_trace_of_an_earlier_version_is_compared_with_what_it_holds(name, cause, ranks, tmp_path):
    ranks(both, tmp_path, "torch", name)
    old, new = read_as_older(tmp_path / "healthy"), read_folder(tmp_path / "healthy")
    assert compare(old, new) is compare(new, old) is compare(old, old) is None
    for planted in (read_folder(tmp_path / "planted"), read_as_older(tmp_path / "planted")):
        for found in (compare(old, planted), compare(planted, old)):
            assert (found.cause, found.step) == (cause, PLANTS[name][1]), found.explain()


def test_thirty_are_planted_in_every_class():
    assert len(PLANTS) >= 30
    assert {cause for cause, *_ in PLANTS.values()} == {
        "settings",
        "random state",
        "data",
        "kernel",
        "program",
        "communication",
        "optimizer",
        "written",
    }
