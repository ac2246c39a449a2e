"""`dpfuse bench` on real ranks: what is measured, what is written, and that every trial leaves the model as it was."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

import dpfuse
from dpfuse.commands import contenders, sweep
from dpfuse.commands.bench_command import Effort, table
from dpfuse.commands.recommendation import recommend
from dpfuse.commands.sweep import Row
from dpfuse.errors import DPFuseError
from dpfuse.tune import Timeline
from tests.commands import models
from tests.commands.models import PLACE
from tests.distributed.processes import run

GRID = [(0.1, 0.05), (0.2, 0.1), (25.0, 1.0), (100.0, 1.0)]  # the last two make the same buckets


def row_of(row):
    """As it was before it became JSON."""
    sizes = row["comm_buffer_size"], row["last_comm_buffer_size"]
    if row["name"] == contenders.TUNED:
        sizes = contenders.DEFAULT
    seconds = tuple(map(tuple, row["seconds"]))
    return Row(row["name"], None if row["buckets"] is None else sizes, row["buckets"], seconds)


@pytest.mark.slow
def test_the_door_measures_and_writes(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--comm_buffer_sizes=0.1,25,inf", "--last-comm-buffer-sizes=0.05,0.1", "--rounds=3", "--steps=2"]
    done = run("-m", "dpfuse.bench", f"{PLACE}:build", *flags, f"--out={tmp_path}", timeout=100, warm_ranks=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["format"], report["ranks"]) == ("dpfuse bench 1", 2)
    assert report["command"].startswith(f"dpfuse bench {PLACE}:build --comm_buffer_sizes=0.1,25,inf")
    sizes = ["0.1 / 0.05 MB", "0.1 / 0.1 MB", "25 / 0.05 MB", "25 / 0.1 MB", "25 / 1 MB"]  # inf makes the same as 25
    names = ["no averaging", "torch DDP", "torch DDP, views", *sizes]
    tuned = [row for row in report["rows"] if row["name"] == "tuned"]  # none if it is what some sizes make, too
    assert [row["name"] for row in report["rows"]] == names + ["tuned"] * len(tuned)
    assert all(row["buckets"] == len(report["tuned"]) for row in tuned)
    for row in report["rows"]:
        assert [len(turn) for turn in row["seconds"]] == [2, 2, 2]
        assert row["median"] > 0
        assert row["name"] in done.stdout
    sizes = [(row["comm_buffer_size"], row["last_comm_buffer_size"]) for row in report["rows"]]
    assert sizes[3:8] == [(0.1, 0.05), (0.1, 0.1), (25, 0.05), (25, 0.1), (25, 1)]
    assert {sizes[0], *sizes[8:]} == {(None, None)}
    rows = [row_of(row) for row in report["rows"]]
    assert recommend(rows).name == report["recommended"]["name"]
    assert table(tuple(rows)) in done.stdout
    assert report["recommended"]["reason"] in done.stdout
    assert "contenders give the same gradients" in done.stderr


def swept(rank, size, name, find_unused):
    seen = []

    class Spy(sweep.Contender):
        def use_plan(self, wrapped):
            super().use_plan(wrapped)
            params = wrapped.module.parameters() if hasattr(wrapped, "module") else []
            plan = wrapped.bucket_plan.layout if isinstance(wrapped, dpfuse.DataParallel) else None
            seen.append((self.name, plan, [len(param._post_accumulate_grad_hooks or ()) for param in params]))

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(contenders, "Contender", Spy)
        found = sweep.sweep(f"{PLACE}:{name}", GRID, Effort(2, 1), find_unused=find_unused)
    return found.plan.layout, [(row.name, row.buckets) for row in found.rows], [row.seconds for row in found.rows], seen


def test_a_turn_has_one_wrapper_and_its_own_buckets(ranks):
    (tuned, rows, seconds, seen), (theirs, *_, others, their_seen) = ranks(swept, "build", False)
    assert (tuned, seconds) == (theirs, others)  # the slowest rank's, on all
    assert [name for name, *_ in seen] == [name for name, *_ in their_seen]
    names = [name for name, _ in rows]
    by_sizes = {plan for name, plan, _ in seen if name.endswith("MB")}
    assert len(rows) == 3 + 3 + (tuned not in by_sizes)
    turns = [name for name, *_ in seen[len(rows) :]]
    assert sorted(turns) == sorted(2 * names)
    assert turns[: len(rows)] != turns[len(rows) :] or turns[: len(rows)] != names  # in random order
    for name, plan, hooks in seen:
        assert (plan == tuned) or name != "tuned"
        assert (plan is None) == (name in ("no averaging", "torch DDP", "torch DDP, views"))
        # What wrappers before this one had hooked is gone.
        assert all(count <= 1 for count in hooks)
    assert dict(rows)["25 / 1 MB"] == 1
    assert dict(rows)["0.1 / 0.05 MB"] > dict(rows)["0.2 / 0.1 MB"] > 1


def test_parameters_without_gradient_need_the_flag_for_ddp(ranks):
    ranks(swept, "uneven", True, timeout=100)


def refused(rank, size, name, text):
    with pytest.raises(DPFuseError, match=text):
        sweep.sweep(f"{PLACE}:{name}", GRID, Effort(1, 1), find_unused=False)
    return dist.get_rank()


def test_without_it_the_proof_says_so(ranks):
    text = r"the check of torch DDP failed on rank \d: .*Pass --find_unused_parameters"
    assert ranks(refused, "uneven", text) == [0, 1]


def test_sizes_that_make_the_same_buckets_are_tried_once():
    specs = dpfuse.plan_buckets(models.build()[0]).specs
    timeline = Timeline.synthetic(specs, 0.01)
    assert contenders.without_duplicates(GRID, timeline, 2) == [(0.1, 0.05), (0.2, 0.1), (25.0, 1.0)]
    assert contenders.without_duplicates([], timeline, 2) == [(25.0, 1.0)]
    # The simplest of them: one size is not the default, rather than two.
    twins = [(0.05, 0.04), (0.05, 0.05), (0.05, 1.0)]
    few = Timeline.synthetic([dpfuse.ParamSpec(name, (1 << 18,), "float32") for name in "abcdefghijkl"], 0.01)
    assert contenders.without_duplicates(twins, few, 2) == [(0.05, 1.0), (25.0, 1.0)]
