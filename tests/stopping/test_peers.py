"""What others do on SIGTERM: how a trial is judged, one trial of ours, and the table of the guide."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.pages import ROOT
from tests.stopping.peers.table import table
from tests.stopping.peers.trial import TARGETS, WAYS, judge, play

PAGE = ROOT / "docs/train/stop_together.md"


def notes(step: int, **end: object) -> list[dict[str, object]]:
    return [{"pid": 1}, {"step": 1}, {"step": step}, end]


@pytest.mark.parametrize(
    ("told", "code", "how"),
    [
        ((notes(9, left=True), notes(9, left=True)), 0, "same step"),
        ((notes(9, left=True), notes(9, left=True)), None, "hang"),
        ((notes(9, left=True), notes(8, left=True)), 0, "other steps"),
        ((notes(9, left=True), notes(9, raised="RuntimeError: closed")), 1, "error"),
        ((notes(9, left=True), notes(9)), 1, "killed"),
    ],
)
def test_a_trial_is_judged_by_what_its_ranks_have_told(told, code, how):
    outcome = judge(told, code, 1.0, 9)
    assert (outcome.how, outcome.saved, outcome.code) == (how, True, code)


@pytest.mark.parametrize("saved", [None, 8])
def test_a_checkpoint_of_an_earlier_step_is_none(saved):
    assert not judge((notes(9, left=True), notes(9, left=True)), 0, 1.0, saved).saved


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS)
def test_with_dpfuse_all_ranks_end_in_the_same_step_and_save(target, tmp_path):
    outcome = play("dpfuse", target, tmp_path)
    assert (outcome.how, outcome.saved, outcome.code) == ("same step", True, 0), outcome


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_flag_that_one_rank_alone_has_lets_the_other_fail(tmp_path):
    outcome = play("flag", "rank 1", tmp_path)
    assert (outcome.how, outcome.saved) == ("error", False), outcome


def test_the_table_of_the_guide_is_that_of_its_record():
    page = PAGE.read_text(encoding="utf-8")
    (name,) = {*re.findall(r"bench/results/(stop-peers-[\w-]+\.json)", page)}
    record = json.loads((ROOT / "bench/results" / name).read_text())
    assert "\n".join(table(record)) in page
    kinds = {(trial["way"], trial["to"]) for trial in record["trials"]}
    assert kinds == {(way, target) for way in WAYS for target in TARGETS}
    assert len(record["trials"]) == 3 * len(kinds), "the page says how many trials each cell has"
    for package, version in record["packages"].items():
        assert f"{package} {version.partition('+')[0]}" in page
