"""`dpfuse tune --simulate`: from a committed timeline and from a recorded one, and its errors."""

from __future__ import annotations

import json
import os
import re

import pytest

from dpfuse.commands import command_line
from dpfuse.commands.command_line import main
from dpfuse.tune import RANKS, Cluster, Timeline, scale
from dpfuse.tune.connection_table import INSIDE, NETWORKS
from tests.commands.models import PLACE
from tests.distributed.processes import JOB_VARIABLES
from tests.docs.pages import ROOT

TIMELINE = ROOT / "bench" / "timelines" / "resnet50-cpu2.json"


@pytest.fixture(autouse=True)
def no_job_around(monkeypatch):
    for name in filter(JOB_VARIABLES.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_committed_timeline_becomes_tables_and_a_report(tmp_path, capsys):
    arguments = ["--link", "ethernet-25", "--inside", "pcie-4", "--ranks", "8,64,512", "--step_time", "75"]
    assert main(["tune", "--simulate", str(TIMELINE), *arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "161 gradients, 102.2 million bytes; a step without communication takes 75.000 ms" in printed
    assert [line for line in printed.splitlines() if line.endswith("; ms")] == ["ring; ms", "tree; ms", "two-level; ms"]
    assert "the best plan first saves 1 % of DDP's step at 64 ranks" in printed
    report = json.loads((tmp_path / "simulation.json").read_text())
    assert (report["format"], report["ranks"], report["backend"]) == ("dpfuse simulate 1", 0, "none")
    assert report["cluster"]["network"]["name"] == "ethernet-25"
    assert (report["cluster"]["gpus_per_node"], report["cluster"]["cards_per_node"]) == (8, 1)
    timeline = Timeline.from_json(json.loads(TIMELINE.read_text())["timeline"])
    cluster = Cluster(INSIDE["pcie-4"], NETWORKS["ethernet-25"])
    for algorithm, found in report["algorithms"].items():
        for row, step in zip(
            found["steps"], scale(timeline, cluster, [8, 64, 512], algorithm=algorithm, compute=0.075), strict=True
        ):
            assert row["ranks"] == step.ranks
            assert row["plans"]["best"]["step"] == pytest.approx(step.seconds("best"))
            assert row["plans"]["DDP"]["exposed"] == pytest.approx(step.exposed["DDP"])
            assert row["plans"]["dpfuse"]["buckets"] == step.buckets["dpfuse"]
    assert report["algorithms"]["ring"]["break_even"] == {"best": 64, "dpfuse": None}


def test_the_page_that_help_names_has_the_table_of_connections():
    page = (ROOT / "docs" / "measurements" / "scale.md").read_text(encoding="utf-8")
    for name, connection in (INSIDE | NETWORKS).items():
        cards = connection.cards if name in NETWORKS else ""
        rate, hop = f"{connection.bandwidth / 1e9:g}", f"{connection.latency * 1e6:g}"
        assert f"| `{name}` | {rate} | {cards} | {hop} | {connection.source} |" in page


def test_a_report_and_a_saved_timeline_are_read_too(tmp_path, capsys):
    Timeline.from_json(json.loads(TIMELINE.read_text())["timeline"]).save(tmp_path / "saved.json")
    outputs = []
    for path in (tmp_path / "saved.json", TIMELINE):
        assert main(["tune", "--simulate", str(path), "--ranks", "8", "--out", str(tmp_path / "out")]) == 0
        outputs.append(capsys.readouterr().out.partition(": 161 gradients")[2])
    assert outputs[0] == outputs[1] != ""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_without_a_file_a_backward_is_recorded_first(tmp_path, capsys):
    arguments = ["--steps", "1", "--ranks", "2,8", "--out", str(tmp_path)]
    assert main(["tune", f"{PLACE}:build", "--simulate", *arguments]) == 0
    assert f"{PLACE}:build: 12 gradients" in capsys.readouterr().out
    report = json.loads((tmp_path / "simulation.json").read_text())
    assert (report["ranks"], report["model"]) == (2, f"{PLACE}:build")
    assert len(Timeline.from_json(report["timeline"]).specs) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["simulation.json"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--link", "infiniband-nd"], "--link: got 'infiniband-nd', expected one of infiniband-ndr, .*; did you mean"),
        (["--inside", "copper"], "--inside: got 'copper', expected one of nvlink-4, .*pcie-3$"),
        (
            ["--ranks", "8,12"],
            "--ranks: 12 ranks do not fill nodes of 8; expected a multiple .*another --gpus_per_node",
        ),
        (["--out", str(TIMELINE)], "--out: cannot make the folder"),
    ],
)
def test_a_wish_that_is_not_possible_is_an_error(tmp_path, capsys, arguments, text):
    assert main(["tune", "--simulate", str(TIMELINE), "--out", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dpfuse tune: --")
    assert re.search(text, error.strip())


def test_a_wish_is_checked_before_ranks_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dpfuse.commands.ranks.spawn", None)
    assert main(["tune", f"{PLACE}:build", "--simulate", "--link", "wire", "--out", str(tmp_path)]) == 1
    assert "--link: got 'wire'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot read .*: No such file or directory; expected a timeline file"),
        ("no JSON", "has no timeline: Expecting value"),
        ("[1, 2]", "has no timeline: expected a JSON object with format"),
        ('{"timeline": {"format": "dpfuse timeline 1"}}', "has no timeline: 'params'"),
    ],
)
def test_a_file_without_a_timeline_is_an_error(tmp_path, capsys, text, expected):
    path = tmp_path / "timeline.json"
    if text is not None:
        path.write_text(text)
    assert main(["tune", "--simulate", str(path), "--out", str(tmp_path / "out")]) == 1
    assert re.search(expected, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_model_in_the_place_of_the_file_is_said(tmp_path, capsys):
    assert main(["tune", "--simulate", f"{PLACE}:build", "--out", str(tmp_path)]) == 1
    assert "to record a model, put module:factory before --simulate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "expected either module:factory or --simulate with a timeline file"),
        (["--simulate"], "expected either module:factory or --simulate with a timeline file"),
        ([f"{PLACE}:build", "--simulate", "file.json"], "expected either module:factory or --simulate"),
        (["--simulate", "file.json", "--ranks", "8,0"], "got '0', expected a whole number from 1 on"),
        (["--simulate", "file.json", "--step_time", "-5"], "got '-5', expected milliseconds above 0"),
        (["--simulate", "file.json", "--step_time", "soon"], "got 'soon', expected milliseconds above 0"),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2(capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_the_default_numbers_of_ranks_are_those_of_the_library():
    assert command_line.RANKS == RANKS


def test_the_report_that_is_read_is_not_overwritten(tmp_path):
    (tmp_path / "report.json").write_text(TIMELINE.read_text())
    assert main(["tune", "--simulate", str(tmp_path / "report.json"), "--ranks", "8", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.json").read_text() == TIMELINE.read_text()
    assert (tmp_path / "simulation.json").exists()
