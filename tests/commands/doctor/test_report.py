"""Findings, the lines of the terminal, the page, the JSON and the exit codes."""

from __future__ import annotations

import json
import math
import re
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from dpfuse.commands.doctor.charts import bars, lines
from dpfuse.commands.doctor.doctor_command import _failure, _signals_as_exceptions
from dpfuse.commands.doctor.findings import Finding, findings_of, remarks_of
from dpfuse.commands.doctor.page import page
from dpfuse.commands.doctor.result import DoctorResult
from dpfuse.commands.doctor.runs import Run, _last_line, _progress, _steps
from dpfuse.commands.doctor.same_numbers import Numbers, judge
from dpfuse.commands.doctor.speed import Link, measure
from dpfuse.commands.doctor.summary import LINES, WIDTH, summary
from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.rules.w01_weights_differ import Drift, Measured
from dpfuse.trace.comparison import Difference
from tests.commands.doctor.made import plain_facts, run_of, timed, traces_of, window
from tests.trace.training import train

EQUAL = Numbers("equal", "The same bits.", 12)
DIFFERENT = Numbers("different", "It differs.", 12, Difference(3, 1, (1,), "kernel", "the loss <b>"))


def report(numbers=EQUAL, findings=(), runs=None, **changes):
    runs = runs or [timed(1, "torch", forward=0.1), timed(2, "dpfuse", forward=0.1)]
    machine = {"machine": machine_facts(torch.device("cpu")), "versions": software_versions()}
    facts = {"changed": {}, "failure": "", "failed_under": "", "remarks": (), **changes}
    facts |= {"speed": measure(runs, 2), "findings": tuple(findings), "machine": machine}
    return DoctorResult("dpfuse doctor train.py '<x>'", runs, numbers, **facts)


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
        (report(Numbers("unknown", "", 0)), 2),
        (report(Numbers("unknown", "", 0), findings=[FINDING]), 1),
        (report(remarks=(FINDING,)), 0),
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
        with pytest.raises(SystemExit) as raised, _signals_as_exceptions():
            signal.raise_signal(number)
        assert raised.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with _signals_as_exceptions():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_the_first_ctrl_c_is_an_exception_and_the_next_one_leaves_the_report_alone():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _signals_as_exceptions():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_losses_that_are_not_finite_are_none_in_the_json():
    run = timed(1, "torch", steps=3)
    values = zip(run.traces[0].steps, ("nan", "inf", "1.0"), strict=True)
    run.traces[0].steps = [{**line, "backwards": [{"value": value}]} for line, value in values]
    told = json.loads(json.dumps(report(runs=[run]).to_json(), allow_nan=False))
    assert told["runs"][0]["losses"] == [None, None, 1.0]


def test_the_summary_answers_each_question():
    text = summary(report(DIFFERENT, [FINDING], changed={"run 1": ["/a/b", "/a/c"], "run 2": ["/a/b"]}))
    for words in ("same numbers?    NO. It differs.", "how fast?", "each kind was run once", "DPF-L01: the sampler"):
        assert words in text
    assert "files changed    2, such as /a/b (2 times), /a/c" in text


def test_of_several_optimizers_the_steps_are_told_together(monkeypatch):
    monkeypatch.setattr("dpfuse.commands.doctor.same_numbers.compare", lambda *_: None)
    runs = [timed(number, wrapper, forward=0.1) for number, wrapper in enumerate(["torch", "dpfuse"] * 2, start=1)]
    assert [run.of_optimizers for run in runs] == [""] * 4
    for trace in [trace for run in runs for trace in run.traces.values()]:
        trace.optimizers.append({"names": []})
    made = report(judge(runs[::2], runs[1::2], None, ()), runs=runs)
    assert "in 12 steps of 2 optimizers." in " ".join(summary(made).split())
    assert page(made).count("<td>12 of 2 optimizers</td>") == 4
    told = json.loads(json.dumps(made.to_json()))
    assert told["numbers"]["text"].endswith("in 12 steps of 2 optimizers.")
    assert [(run["steps"], run["optimizers"]) for run in told["runs"]] == [(12, 2)] * 4


def test_the_summary_shows_findings_whole_with_their_remedy_and_leaves_the_rest_to_the_page():
    long = Finding("DPF-L01", "title", f"{'text ' * 140}Call sampler.set_epoch(epoch) before each pass.", ())
    text = " ".join(summary(report(findings=[long], remarks=(long,))).split())
    assert text.count("Call sampler.set_epoch(epoch) before each pass.") == 2
    assert "…" not in text
    many = [Finding(f"DPF-L{number}", "title", f"{'text ' * 60}Remedy.", ()) for number in range(40)]
    lines_of = summary(report(findings=many)).splitlines()
    shown = sum("DPF-L" in line for line in lines_of)
    assert sum("Remedy." in line for line in lines_of) == shown
    assert lines_of[-2].split() == ["…", "and", str(40 - shown), "more,", "which", "the", "page", "has"]
    assert LINES - 6 < len(lines_of) <= LINES
    assert max(map(len, lines_of)) <= WIDTH


def test_an_interrupted_doctor_says_what_it_has_found_so_far():
    for made in (report(interrupted="run 3, torch DDP"), report(None, [FINDING], interrupted="run 3, torch DDP")):
        assert made.exit_code == made.to_json()["exit code"] == 130
        for text in (" ".join(summary(made).split()), page(made), json.dumps(made.to_json())):
            assert "interrupted in run 3, torch DDP" in text
            assert ("the sampler is not told the epoch" in text) == bool(made.findings)
            assert "nothing was found" not in text.lower()
            assert "nothing found" not in text


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
    numbers = Numbers("different", "far", 2, DIFFERENT.difference)
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


@pytest.mark.parametrize(("ours", "change"), [(0.097, 0), (0.108, 0), (0.08, -0.2), (0.12, 0.2)])
def test_terminal_page_and_json_say_the_same_of_the_speed(ours, change):
    runs = [timed(number, "torch", forward=seconds) for number, seconds in ((1, 0.0975609), (3, 0.102439))]
    made = report(runs=[*runs, timed(2, "dpfuse", forward=ours), timed(4, "dpfuse", forward=ours)])
    assert made.speed.change == pytest.approx(change, abs=0.005)
    short, verdict = made.speed.short, made.speed.verdict
    assert ("20% less" in short, "20% more" in short) == (change < 0, change > 0)
    assert verdict in re.sub(r"\s+", " ", summary(made))
    text = page(made)
    assert f">{short}</b>" in text
    assert verdict[1:] in text
    assert (f'class="bad">{short}' in text) == (change > 0)
    speed = json.loads(json.dumps(made.to_json()))["speed"]
    assert (speed["short"], speed["verdict"]) == (short, verdict)


def test_one_run_of_each_kind_cannot_tell_which_is_faster():
    made = report(runs=[timed(1, "torch", forward=0.1), timed(2, "dpfuse", forward=0.2)])
    assert (made.speed.noise, made.speed.change, made.speed.short) == (None, 0.0, "too few runs to say")


def failing(tmp_path, **facts):
    """A run in which rank 1 has raised, and rank 0 has lost its peer; rank 1 has made no step."""
    notes = {"0": ("RuntimeError", "Connection closed by peer"), "1": ("ValueError", "mine (train.py:9)\nmore")}
    run = timed(1, "torch", steps=3)
    run.code, run.last_line = 1, "ValueError: mine"
    run.traces[1].steps.clear()
    run.facts = {
        rank: plain_facts(findings=[{"what": "error", "kind": kind, "code": "", "text": text}])
        for rank, (kind, text) in notes.items()
    }
    return run


def test_a_program_that_fails_is_not_examined(tmp_path):
    run = failing(tmp_path)
    assert findings_of([run]) == ()  # its traces are short because it has failed
    made = report(None, runs=[run], failure=_failure(run), failed_under="torch")
    said = made.to_json()["not examined"]
    assert [
        part for part in ("run 1", "rank 1", "ValueError: mine", "train.py:9", "run1.log") if part not in said
    ] == []
    assert said in re.sub(r"\s+", " ", summary(made))
    text = page(made)
    assert said.replace("'", "&#x27;")[1:] in text
    for shown in (summary(made), text):
        assert "othing was found" not in shown
        assert "nothing found" not in shown


def test_a_program_without_a_wrapper_is_not_examined():
    made = report(None, runs=[timed(1, "torch")], failure="made no wrapper")
    assert "not examined, since there was no comparison" in summary(made)


def test_charts_leave_out_what_cannot_be_drawn():
    never = lines({"a": [float("nan"), float("inf")]}, label="x")
    assert "not finite from step 0" in never
    assert "polyline" not in never
    assert "nan" not in lines({"a": [1.0, float("nan"), 2.0], "b": [3.0]}, label="x")
    assert bars({}, label="x", unit="ms") == bars({"a": {"b": 0.0}}, label="x", unit="ms") == ""


@pytest.mark.parametrize(
    ("values", "parts", "words"),
    [
        ([1.0, 2.0, 3.0], 1, None),
        ([1.0, None, 3.0], 1, None),  # a step of another optimizer
        ([1.0, 2.0, math.nan, math.nan], 1, "not finite from step 2"),
        ([1.0, math.inf, 2.0, 3.0], 2, "not finite in step 1"),
    ],
)
def test_a_line_ends_where_values_are_not_finite(values, parts, words):
    drawn = lines({"loss": values, "other": [1.0]}, label="x")
    assert drawn.count("<polyline") == parts + 1
    assert f">step {len(values) - 1}<" in drawn  # and not the last finite one
    assert re.findall(r"not finite \w+ step \d+", drawn) == ([words] if words else [])


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


def test_of_weights_that_differ_a_trace_tells_the_step_and_a_check_the_kind(ranks, tmp_path):
    ranks(trained, tmp_path, drifted)
    run = run_of(tmp_path, 1, "torch")
    (found,) = findings_of([run])
    assert (found.code, "after step 2" in found.text) == ("", True)
    drift = Drift(("last.bias",), 8, (3,), 1, 62, (1,), 0, 2, (Measured(1, 0.5, True, 0.0),), 1)
    note = {"what": "warning", "kind": "WeightsWarning", "code": "DPF-W01", "text": drift.text(0)}
    run.facts["0"]["findings"] = [note]
    (told,) = findings_of([run])
    assert (told.code, told.title) == ("DPF-W01", found.title)
    assert told.text == f"{found.text} It is one bit, as after a fault of memory."
    for trace in run.traces.values():
        trace.steps.clear()  # without a step that shows it, the check has the word
    (told,) = findings_of([run])
    assert told.text == drift.text(0).removeprefix("DPF-W01: ")


def test_of_a_step_that_is_left_out_the_trace_has_the_number_too():
    drift = Drift(("weight",), 1, (3,), 1, 62, (1,), 0, 2, (Measured(3, 0.5, False, 0.5),), 1)
    note = {"what": "warning", "kind": "WeightsWarning", "code": "DPF-W01", "text": drift.text(0)}
    run = traced(EQUAL_STEPS, EQUAL_STEPS)
    run.traces[1].steps[1]["backwards"] *= 2
    run.facts["0"]["findings"] = [note]
    (told,) = findings_of([run])
    assert (told.code, told.title) == ("DPF-W01", "a rank leaves out steps")
    assert "step 1 comes after other numbers of averaged backwards" in told.text
    assert told.text.endswith("The values differ by the factor 0.5, as after weight decay or a scaling on some ranks.")


def same_data(point, run, value):
    if point == "wrapped":
        run.net.dropout.p = 0.0
    return torch.full_like(value, run.step % 3) if point in ("inputs", "targets") else value


def same_inputs(point, run, value):
    return torch.full_like(value, run.step) if point == "inputs" else value


def drifted(point, run, value):
    if point == "before step" and run.step == 2 and run.rank == 1:
        run.net.last.bias.grad.add_(1.0)
    return value


def trained(rank: int, size: int, folder: Path, plant) -> None:
    train(folder, "torch", plant)


def written(point, run, value):
    if point == "after step" and run.step == 2 and run.rank == 1:
        run.net.last.bias.data.add_(1.0)
    return value


@pytest.mark.parametrize(
    ("plant", "title", "words"),
    [
        (same_data, "the same batches on every rank", "DistributedSampler"),
        (drifted, "the weights of the ranks differ", "after step 2 the ranks hold different weights in last.bias"),
        (drifted, "the weights of the ranks differ", "trained by the same optimizer, and loaded on every rank?"),
        (written, "the weights of the ranks differ", "after step 3 the ranks hold different weights in last.bias"),
        (written, "the weights of the ranks differ", "They were equal after step 2 and differed when step 3 began, so"),
    ],
)
def test_traces_show_what_is_wrong_also_under_torchs_class(plant, title, words, ranks, tmp_path):
    ranks(trained, tmp_path, plant)
    (found,) = findings_of([run_of(tmp_path, 1, "torch")])
    assert found.title == title
    assert words in found.text


def test_equal_inputs_are_a_remark_where_the_gradients_differ(ranks, tmp_path):
    """Each rank has other targets, and dropout draws other numbers."""
    ranks(trained, tmp_path, same_inputs)
    run = run_of(tmp_path, 1, "torch")
    assert findings_of([run]) == ()
    assert [(one.code, one.title) for one in remarks_of([run], None)] == [("DPF-L05", "the same inputs on every rank")]


HOOKS = {  # the ranks on which the program puts a hook, what it returns, and whether that is told
    "on one rank": ((0,), lambda grad, rank: grad.clamp(-1e-3, 1e-3), True),
    "on one rank, where it only reads": ((0,), lambda grad, rank: None, False),
    "on both ranks": ((0, 1), lambda grad, rank: grad.clamp(-1e-3, 1e-3), False),
    "on both ranks, with a condition": ((0, 1), lambda grad, rank: grad * 0.5 if rank == 0 else None, True),
    "on both ranks, without effect": ((0, 1), lambda grad, rank: grad.nan_to_num(), False),
}


def hooked(rank: int, size: int, folder: Path, name: str) -> None:
    ranks_with_it, change, _ = HOOKS[name]

    def plant(point, run, value):
        if point == "wrapped" and rank in ranks_with_it:
            run.net.last.weight.register_hook(lambda grad: change(grad, rank))
        return value

    train(folder, "torch", plant)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_change_gradients_on_one_rank_alone_are_a_remark(name, ranks, tmp_path):
    ranks(hooked, tmp_path, name)
    run = run_of(tmp_path, 1, "torch")
    assert findings_of([run]) == ()
    found = remarks_of([run], None)
    told = HOOKS[name][-1]
    assert [one.title for one in found] == ["gradients are changed on some ranks"] * told
    if told:
        assert "on rank 0 alone, hooks of the program change gradients" in found[0].text
        assert "those of last.weight of model 0 (Net)" in found[0].text


def test_a_hook_that_both_ranks_have_may_change_on_one_what_it_has_to():
    run = timed(1, "torch", steps=4)
    for rank, trace in run.traces.items():
        trace.models[0]["names"] = ["weight"]
        for step, line in enumerate(trace.steps):
            behind = "b" * 8 if rank == 1 and step == 2 else "a" * 8  # one gradient was too large
            line["backwards"] = [{"value": 1.0, "local": {"0": "a" * 8}, "hooked": {"0": behind}}]
    assert remarks_of([run], None) == ()
    for line in run.traces[0].steps:
        line["backwards"][0]["hooked"] = {}
    assert [one.title for one in remarks_of([run], None)] == ["gradients are changed on some ranks"]


def traced(*ranks, count=1, unused=()):
    """A run whose steps have, on each rank, these hashes of averages and of weights, and so many averages a step."""
    run = timed(1, "torch", ranks=len(ranks), steps=3)
    for rank, rows in enumerate(ranks):
        trace = run.traces[rank]
        trace.optimizers[0] |= {"names": ["weight"], "class": "SGD"}
        trace.models[0]["names"] = ["weight"]
        for line, (averaged, weights) in zip(trace.steps, rows, strict=True):
            of_model = {"0": averaged}
            line |= {
                "backwards": [{"averaged": of_model, "held": {"0": [1]}}] * count if averaged else [{}],
                "parameters": weights,
            }
    run.facts = {str(rank): plain_facts(unused={"0": list(unused)}) for rank in range(len(ranks))}
    return run


EQUAL_STEPS = [("a" * 8, "1" * 8), ("b" * 8, "2" * 8), ("c" * 8, "3" * 8)]


def test_weights_that_part_behind_the_same_average_are_named_and_no_local_steps():
    parts = [EQUAL_STEPS[0], ("b" * 8, "9" * 8), ("c" * 8, "8" * 8)]
    apart = [EQUAL_STEPS[0], ("x" * 8, "9" * 8), ("y" * 8, "8" * 8)]
    assert findings_of([traced(EQUAL_STEPS, EQUAL_STEPS)]) == findings_of([traced(EQUAL_STEPS, apart)]) == ()
    (found,) = findings_of([traced(EQUAL_STEPS, parts)])
    assert "after step 1 the ranks hold different weights in weight" in found.text
    local = [("", weights) for _, weights in EQUAL_STEPS]
    assert findings_of([traced(local, [("", "9" * 8)] * 3)]) == ()
    begun = [local[0], *EQUAL_STEPS[1:]]  # they part in a local step, and train on with averages
    assert findings_of([traced(begun, [("", "9" * 8), ("b" * 8, "8" * 8), ("c" * 8, "7" * 8)])]) == ()


def test_steps_that_ranks_have_hashed_in_two_ways_are_not_compared():
    run = traced(EQUAL_STEPS, EQUAL_STEPS)
    line = run.traces[1].steps[1]  # its optimizer has stepped more often by then, so this step is not hashed in full
    line["all_parameters"] = line.pop("parameters")
    assert findings_of([run]) == ()


def test_a_rank_that_leaves_out_steps_is_named():
    run = traced(EQUAL_STEPS, EQUAL_STEPS)
    run.traces[1].steps[1]["backwards"] *= 2
    (found,) = findings_of([run])
    assert "step 1 comes after other numbers of averaged backwards: 1 on rank 0 and 2 on rank 1" in found.text
    run.traces[1].steps.clear()
    (found,) = findings_of([run])
    assert "rank 1 makes no step of an optimizer, and others do" in found.text


def test_a_rank_that_stops_stepping_is_named_and_one_that_has_joined_is_not():
    run = traced(EQUAL_STEPS, EQUAL_STEPS)
    del run.traces[1].steps[1:]
    assert findings_of([run]) == ()  # its inputs have ended: it runs no backward of its own
    run.facts["1"]["behind"] = 2
    (found,) = findings_of([run])
    assert found.title == "a rank leaves out steps"
    assert "rank 1 made 1 of 3 steps of an optimizer, and then 2 averaged backwards without one" in found.text


def test_inputs_that_never_change_are_not_the_same_batches_by_mistake():
    run = traced(EQUAL_STEPS, EQUAL_STEPS)
    for trace in run.traces.values():
        for line in trace.steps:
            line["forwards"] = [{"inputs": "a"}]
    assert findings_of([run]) == ()
    for rank, trace in run.traces.items():
        trace.steps[1]["forwards"] = [{"inputs": "b"}]
        trace.steps[1]["backwards"][0]["local"] = {"0": f"{rank:08x}"}
    assert findings_of([run]) == ()  # each rank takes its part of them in forward, or has other targets
    for trace in run.traces.values():
        trace.steps[2]["backwards"][0]["local"] = {"0": "c" * 8}
    assert [one.title for one in findings_of([run])] == ["the same batches on every rank"]


def test_parameters_that_no_rank_has_used_are_named():
    run = traced(EQUAL_STEPS, EQUAL_STEPS, unused=["weight"])
    (found,) = findings_of([run])
    assert (found.title, "weight of model 0 (Net)" in found.text) == ("unused parameters", True)
    run.facts["1"]["unused"]["0"] = []
    assert findings_of([run]) == ()


def test_what_dpfuse_logs_is_a_remark_and_a_group_of_one_rank_is_wrong():
    notes = [
        {"what": "log", "kind": "dpfuse.loop", "code": code, "text": f"{code}: rank 0"}
        for code in ("DPF-L09", "DPF-L03")
    ]
    run = timed(2, "dpfuse")
    run.facts["0"] = plain_facts(findings=notes)
    assert [(one.code, one.title) for one in findings_of([run])] == [("DPF-L09", "a group of one rank")]
    assert [one.code for one in remarks_of([run], None)] == ["DPF-L03"]
    text = summary(report(remarks=remarks_of([run], None)))
    assert "what is wrong?   nothing was found\nmay be meant so  DPF-L03: rank 0" in text


@pytest.mark.parametrize(
    ("of_ranks", "hashes", "told"),
    [
        ((["weight"], ["weight"]), "a" * 8 + "b" * 8, True),
        ((["weight"], ["bias"]), "a" * 8 + "b" * 8, False),  # each rank steps its part
        ((["weight"], ["weight"]), "a" * 8 + "-" * 8, False),  # it got no gradient
        (([""], [""]), "a" * 8 + "b" * 8, False),  # the optimizer has copies
    ],
)
def test_parameters_that_no_optimizer_has_are_a_remark(of_ranks, hashes, told):
    run = traced(EQUAL_STEPS, EQUAL_STEPS)
    for names, trace in zip(of_ranks, run.traces.values(), strict=True):
        trace.models[0]["names"], trace.optimizers[0]["names"] = ["weight", "bias"], names
        for line in trace.steps:
            line["backwards"] = [{"averaged": {"0": hashes}, "held": {"0": [1]}}]
    found = [one for one in remarks_of([run], None) if one.code == "DPF-L04"]
    assert len(found) == told
    if told:
        assert "bias got gradients, and in 3 steps no optimizer has stepped on them" in found[0].text


def test_what_windows_show_is_a_remark_with_its_code():
    steps = [window("l0lla") if number % 5 == 4 else window("lla") for number in range(20)]
    for line in [*steps[10], *steps[11]]:
        line["parameters"] = line.pop("all_parameters")
        line["backwards"][1] |= {"rescaled": {"0": [1]}, "local": {"0": "f" * 16}}
    run = timed(1, "torch")
    run.traces = traces_of(*steps)
    assert findings_of([run]) == ()
    assert [(one.code, one.where) for one in remarks_of([run], None)] == [
        ("DPF-L03", ("run 1, torch DDP",)),
        ("DPF-L06", ("run 1, torch DDP",)),
    ]
    run.traces = traces_of(*[window("la") for _ in range(8)], window("l", ("1", "2")), window("la", ("1", "2")))
    assert "DPF-L03" in [one.code for one in remarks_of([run], None)]


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ({"epochs": [0, 0, 0], "set": False}, True),
        ({"epochs": [0, 0], "set": False}, False),
        ({"epochs": [0, 0, 0], "set": True}, False),
        ({"epochs": [0, 1, 2], "set": False}, False),  # the program has set the attribute
        ({"epochs": [], "set": False}, False),
    ],
)
def test_a_sampler_whose_epoch_is_never_set_in_three_passes_is_wrong(sampler, told):
    run = timed(1, "torch")
    run.facts["0"] = plain_facts(samplers=[{"epochs": [], "set": False}, sampler])
    found = findings_of([run])
    assert [one.code for one in found] == ["DPF-L11"] * told
    if told:
        assert "the training made 3 passes over a DistributedSampler with shuffle=True" in found[0].text


@pytest.mark.parametrize(("count", "exposed", "told"), [(4, 0.01, True), (4, 0.0001, False), (1, 0.01, False)])
def test_averages_that_one_would_replace_are_a_remark_where_they_cost_time(count, exposed, told):
    link = Link(1e6, 0.02, exposed, 0.1, 4)
    found = remarks_of([traced(EQUAL_STEPS, EQUAL_STEPS, count=count)], link)
    assert [one.code for one in found] == ["DPF-L10"] * told
    if told:
        assert "4 averaged backwards come before each of 3 steps of SGD" in found[0].text
        assert "up to 7.5 of 100 ms" in found[0].text


def buffered(rank: int, size: int, folder: Path, options) -> None:
    train(folder, "dpfuse", buffers=True, **options)


@pytest.mark.parametrize("sent", [True, False])
def test_buffers_that_each_rank_keeps_are_a_remark(sent, ranks, tmp_path):
    ranks(buffered, tmp_path, {} if sent else {"broadcast_buffers": False})
    run = run_of(tmp_path, 2, "dpfuse")
    assert findings_of([run]) == ()
    found = remarks_of([run], None)
    assert [one.title for one in found] == ["buffers differ between ranks"] * (not sent)
    if not sent:
        assert "norm.running_mean, norm.running_var of model 0 (Net) differ between ranks" in found[0].text
        text = summary(report(remarks=found))
        assert "may be meant so  buffers differ between ranks: norm.running_mean" in text


def test_nothing_is_wrong_with_a_healthy_run(ranks, tmp_path):
    ranks(trained, tmp_path, None)
    assert findings_of([run_of(tmp_path, 1, "torch")]) == ()


@pytest.mark.parametrize(
    ("code", "notes", "log", "reason"),
    [
        (None, [], "", "it made no step for too long, and was ended"),
        (7, [], "one\nlast words\n\n", "exit code 7: last words"),
        (1, [("KeyError", "\n")], "", "rank 0 raised KeyError"),
        (
            1,
            [("RuntimeError", "Connection closed by peer"), ("ValueError", "mine\nmore")],
            "",
            "rank 1 raised ValueError: mine",
        ),
    ],
)
def test_the_reason_of_a_failure_is_the_first_error_that_is_not_a_consequence(code, notes, log, reason, tmp_path):
    (tmp_path / "log.txt").write_text(log)
    last = _last_line(tmp_path / "log.txt")
    facts = {
        str(rank): plain_facts(findings=[{"what": "error", "kind": kind, "code": "", "text": text}])
        for rank, (kind, text) in enumerate(notes)
    }
    assert Run(1, "torch", code, 1.0, tmp_path / "log.txt", {}, facts, last).reason() == reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"replaceable": 0, "derived": ["My"]}, "My derives from torch's DistributedDataParallel, and dpfuse does not"),
        (
            {"replaceable": 0, "unwrapped": 50},
            "under torch DDP before an optimizer had made 50 steps; .*more --steps",
        ),
        ({"replaceable": 0}, "made no DistributedDataParallel, or no step of an optimizer, under torch DDP;"),
    ],
)
def test_why_nothing_can_be_compared_where_nothing_failed(facts, words):
    run = timed(1, "torch")
    run.facts = {str(rank): plain_facts(**facts) for rank in range(2)}
    assert not run.replaceable
    assert re.search(words, _failure(run))


def test_a_run_in_which_one_wrapper_can_be_replaced_is_compared():
    run = timed(1, "torch")
    run.facts = {"0": plain_facts(derived=["My"]), "1": plain_facts(replaceable=0)}
    assert run.replaceable


def test_steps_without_a_trace_are_progress(tmp_path):
    assert _progress(tmp_path) == (0, 0)
    (tmp_path / "unwrapped1").write_text("..")
    assert _progress(tmp_path) == (0, 2)
    (tmp_path / "rank1.jsonl").write_text("{}\n")  # rank 0 may make no step at all
    assert _progress(tmp_path) == (3, 2)


def test_a_step_is_one_of_the_optimizer_that_has_made_most(tmp_path):
    trace = tmp_path / "rank0.jsonl"
    assert _steps(_written(trace, [])) == 0
    assert _steps(_written(trace, [0, 1] * 27 + [0])) == 28


def _written(trace, optimizers):
    lines = [{"kind": "step", "step": number, "optimizer": one} for number, one in enumerate(optimizers)]
    trace.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return trace
