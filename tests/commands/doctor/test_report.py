"""Findings, the thirty lines of the terminal, the page, the JSON and the exit codes."""

from __future__ import annotations

import json
import math
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from dpfuse.commands.doctor.charts import bars, lines
from dpfuse.commands.doctor.doctor_command import _terminated_as_interrupted
from dpfuse.commands.doctor.findings import Finding, findings_of
from dpfuse.commands.doctor.numbers import Numbers
from dpfuse.commands.doctor.page import page
from dpfuse.commands.doctor.report import Report
from dpfuse.commands.doctor.runs import Run
from dpfuse.commands.doctor.speed import measure
from dpfuse.commands.doctor.summary import summary
from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.trace.comparison import Difference
from tests.commands.doctor.made import plain_facts, run_of, timed
from tests.trace.training import train

EQUAL = Numbers("equal", "The same bits.", 12)
DIFFERENT = Numbers("different", "It differs.", 12, Difference(3, 1, (1,), "kernel", "the loss <b>"))


def report(numbers=EQUAL, findings=(), runs=None, **changes):
    runs = runs or [timed(1, "torch", forward=0.1), timed(2, "dpfuse", forward=0.1)]
    machine = {"machine": machine_facts(torch.device("cpu")), "versions": software_versions()}
    facts = {"changed": {}, "failure": "", "failed_under": "", **changes}
    facts |= {"speed": measure(runs, 2), "findings": tuple(findings), "remarks": (), "machine": machine}
    return Report("dpfuse doctor train.py '<x>'", runs, numbers, **facts)


FINDING = Finding("DPF-L01", "a warning (LoopWarning)", "the sampler is not told the epoch & <more>", ("run 2",))


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (report(), 0),
        (report(Numbers("close", "", 9)), 0),
        (report(findings=[FINDING]), 1),
        (report(DIFFERENT), 1),
        (report(Numbers("itself", "", 9)), 1),
        (report(Numbers("void", "", 9)), 2),
        (report(None, failure="it fails", failed_under="torch"), 2),
        (report(None, failure="it fails", failed_under="dpfuse"), 1),
        (report(None, failure="made no DistributedDataParallel"), 2),
    ],
)
def test_exit_codes(made, code):
    assert made.exit_code == code
    assert json.loads(json.dumps(made.to_json(), allow_nan=False))["exit code"] == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_doctor_is_an_exception_unless_it_is_ignored(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as raised, _terminated_as_interrupted():
            signal.raise_signal(number)
        assert raised.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with _terminated_as_interrupted():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_numbers_that_are_not_finite_are_none_in_the_json():
    made = report(Numbers("different", "", 2, None, (math.nan, 1.0), (math.inf, 0.0)))
    numbers = json.loads(json.dumps(made.to_json(), allow_nan=False))["numbers"]
    assert (numbers["distance"], numbers["distance of DDP"]) == ([None, 1.0], [None, 0.0])


def test_the_summary_answers_each_question():
    text = summary(report(DIFFERENT, [FINDING], changed={"run 1": ["/a/b", "/a/c"], "run 2": ["/a/b"]}))
    for words in ("same numbers?    NO. It differs.", "how fast?", "1.00 of one with DDP", "DPF-L01: the sampler"):
        assert words in text
    assert "files changed    2, such as /a/b" in text


def test_the_summary_has_thirty_lines_at_most():
    many = [Finding(f"DPF-L{number}", "title", "text " * 60, ()) for number in range(40)]
    lines_of = summary(report(findings=many)).splitlines()
    assert len(lines_of) == 30
    assert lines_of[-1] == "… the page has the rest"
    assert max(map(len, lines_of)) <= 110


class Checker(HTMLParser):
    """Checks that tags are closed in order, and collects what a page would fetch."""

    VOID = frozenset({"meta", "line", "polyline", "rect"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_no_network_and_escapes_what_it_shows():
    run = timed(3, "dpfuse", forward=0.1)
    for trace in run.traces.values():
        trace.steps = [{**line, "backwards": [{"value": 1.0 / (1 + n)}]} for n, line in enumerate(trace.steps)]
    numbers = Numbers("different", "far", 2, DIFFERENT.difference, (1e-3, 2e-3), (1e-7, 0.0))
    text = page(report(numbers, [FINDING], [timed(1, "torch", forward=0.1), run], changed={"run 1": ["/a/<b>"]}))
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.fetched == []
    assert {"svg", "table", "polyline"} <= checker.tags
    assert "script" not in checker.tags
    assert not {"http:", "https:", "@import", "url("} & set(text.split())
    for raw in ("<x>", "<more>", "<b> ", "/a/<b>"):
        assert raw not in text
    assert 'name="viewport" content="width=device-width' in text


def test_a_page_of_a_failure_says_it():
    text = page(report(None, failure="the program fails under torch DDP: ValueError: <no>", failed_under="torch"))
    assert "the program fails under torch DDP: ValueError: &lt;no&gt;" in text
    assert "not compared" in text


def test_charts_leave_out_what_cannot_be_drawn():
    assert lines({"a": [float("nan"), float("inf")]}, label="x") == ""
    assert lines({"a": [0.0, -1.0]}, label="x", log=True) == ""
    assert "nan" not in lines({"a": [1.0, float("nan"), 2.0], "b": [3.0]}, label="x")
    assert bars({}, label="x", unit="ms") == bars({"a": {"b": 0.0}}, label="x", unit="ms") == ""


def test_what_dpfuse_says_counts_once_with_its_code():
    notes = [
        {"what": "warning", "kind": "LoopWarning", "code": "DPF-L01", "text": "DPF-L01: step 3"},
        {"what": "warning", "kind": "FutureWarning", "code": "", "text": "broadcast_buffers"},
        {"what": "error", "kind": "DPFuseError", "code": "", "text": "the end"},
    ]
    runs = [timed(1, "torch", ranks=2), timed(2, "dpfuse", ranks=2)]
    runs[1].facts = {"0": plain_facts(findings=notes), "1": plain_facts(findings=notes[:1])}
    (found,) = findings_of(runs)
    assert (found.code, found.text, found.where) == ("DPF-L01", "step 3", ("run 2, dpfuse",))


def test_a_code_of_a_check_stands_for_what_the_trace_shows(ranks, tmp_path):
    ranks(trained, tmp_path, drifted)
    note = {"what": "warning", "kind": "WeightsWarning", "code": "DPF-W01", "text": "DPF-W01: last.bias"}
    run = run_of(tmp_path, 1, "torch")
    assert [one.code for one in findings_of([run])] == [""]
    run.facts["0"]["findings"] = [note]
    assert [one.code for one in findings_of([run])] == ["DPF-W01"]


def same_data(point, run, value):
    return torch.full_like(value, run.step) if point == "inputs" else value


def drifted(point, run, value):
    if point == "before step" and run.step == 2 and run.rank == 1:
        run.net.last.bias.grad.add_(1.0)
    return value


def trained(rank: int, size: int, folder: Path, plant) -> None:
    train(folder, "torch", plant)


@pytest.mark.parametrize(
    ("plant", "title", "words"),
    [
        (same_data, "the same batches on every rank", "DistributedSampler"),
        (drifted, "the weights of the ranks differ", "after step 2 the ranks hold different weights in last.bias"),
    ],
)
def test_traces_show_what_is_wrong_also_under_torchs_class(plant, title, words, ranks, tmp_path):
    ranks(trained, tmp_path, plant)
    (found,) = findings_of([run_of(tmp_path, 1, "torch")])
    assert found.title == title
    assert words in found.text


def test_nothing_is_wrong_with_a_healthy_run(ranks, tmp_path):
    ranks(trained, tmp_path, None)
    assert findings_of([run_of(tmp_path, 1, "torch")]) == ()


@pytest.mark.parametrize(
    ("code", "notes", "log", "reason"),
    [
        (None, [], "", "it made no step for too long, and was ended"),
        (7, [], "one\nlast words\n\n", "exit code 7: last words"),
        (
            1,
            [("RuntimeError", "Connection closed by peer"), ("ValueError", "mine\nmore")],
            "",
            "ValueError: mine",
        ),
    ],
)
def test_the_reason_of_a_failure_is_the_first_error_that_is_not_a_consequence(code, notes, log, reason, tmp_path):
    (tmp_path / "log.txt").write_text(log)
    facts = {
        str(rank): plain_facts(findings=[{"what": "error", "kind": kind, "code": "", "text": text}])
        for rank, (kind, text) in enumerate(notes)
    }
    assert Run(1, "torch", code, 1.0, tmp_path / "log.txt", {}, facts).reason() == reason
