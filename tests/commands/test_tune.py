"""`dpfuse tune` on real ranks: what it prints, what it writes, and how it ends when something fails."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import sys

import pytest

import dpfuse
from dpfuse.commands.command_line import main
from dpfuse.commands.ranks import build_on_all_ranks
from dpfuse.commands.tune_command import tune_wrapped
from dpfuse.errors import DPFuseError
from dpfuse.tune import CostTable, Timeline, optimal_plan
from tests.commands import models
from tests.commands.models import PLACE
from tests.distributed.processes import JOB_VARIABLES, launch

STEPS = 2


@pytest.fixture(autouse=True)
def no_job_around(monkeypatch):
    for name in filter(JOB_VARIABLES.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def check_folder(folder, ranks):
    report = json.loads((folder / "report.json").read_text())
    assert (report["format"], report["ranks"], report["backend"]) == ("dpfuse tune 1", ranks, "gloo")
    assert report["model"] == f"{PLACE}:build"
    assert report["command"].startswith(f"dpfuse tune {PLACE}:build")
    assert {"cpu", "cores", "gpu"} <= report["machine"].keys()
    assert {"dpfuse", "torch", "python"} <= report["versions"].keys()
    timeline, cost = Timeline.from_json(report["timeline"]), CostTable.from_json(report["cost"])
    tuned = report["plans"]["tuned"]
    best = optimal_plan(timeline, cost)
    names = [[best.specs[index].name for index in bucket.params] for bucket in best.buckets]
    assert [bucket["params"] for bucket in tuned] == names
    assert sorted(itertools.chain(*names)) == sorted(name for name, _ in models.build()[0].named_parameters())
    assert sum(bucket["bytes"] for bucket in tuned) == sum(param.nbytes for param in models.build()[0].parameters())
    assert len(report["before"]["total"]) == STEPS
    assert len(report["schedules"]["before"]["buckets"]) == len(report["plans"]["before"])
    assert len(report["schedules"]["expected"]["buckets"]) == len(tuned)
    in_use = report["schedules"]["after" if report["kept"] else "before"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sent = [event for event in events if re.match(r"bucket \d+ \(", event["name"]) and "args" in event]
    assert [event["args"]["bytes"] for event in sent] == [bucket["nbytes"] for bucket in in_use["buckets"]]
    return report


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_ranks_are_started_and_a_report_is_left(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "new" / "folder"
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["tune", f"{PLACE}:build", "--steps", str(STEPS), "--out", str(folder)]) == 0
    report = check_folder(folder, ranks=2)
    printed = capsys.readouterr().out
    assert "before: " in printed
    assert ('plan="auto"' in printed) == report["kept"]
    assert "no plan.png: it needs matplotlib" in printed
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "trace.json"]


@pytest.mark.slow
def test_inside_a_job_its_ranks_are_used_and_one_reports(tmp_path):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "saved.json"
    command = ["-m", "dpfuse", "tune", f"{PLACE}:build", f"--steps={STEPS}", f"--out={tmp_path}", f"--save={saved}"]
    done = launch("--nproc_per_node", 3, *command, timeout=100, warm_ranks=True)
    assert done.returncode == 0, done.stderr
    report = check_folder(tmp_path, ranks=3)
    plan = dpfuse.load_plan(saved)
    names = [[plan.specs[index].name for index in bucket.params] for bucket in plan.buckets]
    assert names == [bucket["params"] for bucket in report["plans"]["tuned" if report["kept"] else "before"]]
    assert f'plan="{saved}"' in done.stdout
    assert done.stdout.count("report: ") == 1
    assert (tmp_path / "plan.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_a_rank_that_fails_ends_all_with_exit_code_1(tmp_path, capsys):
    before = {*multiprocessing.active_children()}
    assert main(["tune", f"{PLACE}:breaks_later", "--out", str(tmp_path), "--nproc_per_node", "2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        f"dpfuse tune: rank 1: {PLACE}:breaks_later: the loss raised OSError, expected no exception."
    )
    assert error.endswith("OSError: no data any more\n")
    assert "models.py" in error  # the user's line, and none of ours
    assert "user_model.py" not in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
    assert {*multiprocessing.active_children()} <= before


def test_a_factory_that_fails_on_one_rank_is_an_error_on_all(rank, size):
    text = f"the model of {PLACE}:breaks_on_rank_1 failed on rank 1: .*the factory raised OSError"
    with pytest.raises(DPFuseError, match=text):
        build_on_all_ranks(f"{PLACE}:breaks_on_rank_1")


@pytest.mark.slow
def test_the_command_names_the_rank_of_such_a_factory_once(tmp_path, capsys):
    place = f"{PLACE}:breaks_on_rank_1"
    assert main(["tune", place, "--out", str(tmp_path), "--nproc_per_node", "2"]) == 1
    assert capsys.readouterr().err.startswith(
        f"dpfuse tune: the model of {place} failed on rank 1: {place}: the factory"
    )


def progress(rank, size):
    target = build_on_all_ranks(f"{PLACE}:build")
    model = dpfuse.DataParallel(target.module)
    told = []
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("dpfuse.commands.tune_command.SILENCE", -1.0)
        monkey.setattr("dpfuse.commands.tune_command.say", told.append)
        tune_wrapped(target, model, 1, (25, 1))
    return told


def test_a_long_tuning_says_how_far_it_is(ranks):
    for told in ranks(progress):
        assert [re.sub(r"about \d+ s", "about N s", line) for line in told] == [
            f"backward {done} of about 5, about N s to go" for done in range(1, len(told) + 1)
        ]
        assert told


def test_tuning_that_comes_to_no_end_is_given_up(rank, size):
    target = build_on_all_ranks(f"{PLACE}:build")
    model = dpfuse.DataParallel(target.module)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("dpfuse.tune.tuning._Tuner._after_backward", lambda self: None)
        with pytest.raises(DPFuseError, match="nothing was tuned within 30 backwards"):
            tune_wrapped(target, model, 1, (25, 1))


def test_tuning_that_fails_is_an_error(rank, size):
    target = build_on_all_ranks(f"{PLACE}:build")
    model = dpfuse.DataParallel(target.module)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr("dpfuse.tune.tuning.optimal_plan", lambda *args, **caps: 1 / 0)
        with (
            pytest.warns(UserWarning, match="autotune has changed nothing"),
            pytest.raises(DPFuseError, match=f"{PLACE}:build: nothing was changed: .*division by zero"),
        ):
            tune_wrapped(target, model, 1, (25, 1))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
         "--nproc_per_node=2 was given on rank 1 of a job of 4"),
        ({"RANK": "1"}, "WORLD_SIZE is not set although RANK='1' is"),
    ],
)  # fmt: skip
def test_a_job_that_does_not_fit_is_said(tmp_path, capsys, monkeypatch, variables, text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["tune", f"{PLACE}:build", "--nproc_per_node", "2", "--out", str(tmp_path)]) == 1
    assert text in capsys.readouterr().err


def test_nothing_is_started_for_a_bad_model_or_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dpfuse.commands.ranks.spawn", None)
    assert main(["tune", f"{PLACE}:biuld", "--out", str(tmp_path)]) == 1
    assert "did you mean 'build'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["tune", f"{PLACE}:build", "--out", str(tmp_path / "file")]) == 1
    assert "--out: cannot make the folder" in capsys.readouterr().err
    (tmp_path / "report.json").mkdir()
    assert main(["tune", f"{PLACE}:build", "--out", str(tmp_path)]) == 1
    assert "--out: cannot write report.json into the folder" in capsys.readouterr().err
