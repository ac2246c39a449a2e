"""Calls around steps: what is told of made traces, and what the doctor hears and tells of the programs themselves."""

from __future__ import annotations

import re

import pytest

from dpfuse.commands.doctor.findings import remarks_of
from dpfuse.commands.doctor.too_few_steps import STEPS
from dpfuse.rules import (
    averaged_twice,
    l12_never_zeroed,
    l13_zeroed_in_window,
    l14_clipped_while_scaled,
    l15_schedule_per_batch,
)
from dpfuse.trace_file import read_folder
from tests.commands.doctor.cases import NEAR, OF_CALLS, PLANTED
from tests.commands.doctor.made import called, run_of, traces_of, window
from tests.commands.doctor.test_observer import GROUP, observed
from tests.commands.programs import PROGRAMS

LOOKS = {
    "DPF-L12": l12_never_zeroed.find,
    "DPF-L13": l13_zeroed_in_window.find,
    "DPF-L14": l14_clipped_while_scaled.find,
    "DPF-L15": l15_schedule_per_batch.find,
    "again": averaged_twice.find,
}


def turns(text, calls, count=50, old=False, **about):
    """So many steps with these backwards and calls. Where gradients are old, the first backward finds them."""
    first = window(text, calls=called(calls, of=(), whole=()))  # of an optimizer that has not stepped before
    windows = [first, *[window(text, calls=called(calls, **about)) for _ in range(count - 1)]]
    for lines in windows[1:] if old else []:
        for line in lines:
            line["backwards"][0]["held"] = {"0": [1, 1]}
    return windows


def told(windows, **changes):
    traces = traces_of(*windows)
    for trace in traces.values():
        trace.optimizers += [{"class": "Adam", "names": []}] * changes.get("optimizers", 0)
    return [code for code, look in LOOKS.items() if look(traces) is not None]


WRONG = {
    "never zeroed": ("DPF-L12", "a", "bS", {"old": True}),
    "never zeroed, with windows and clipping": ("DPF-L12", "lla", "bbbchS", {"old": True}),
    "zeroed before each batch": ("DPF-L13", "l0l0a", "zbzbzbS", {}),
    "zeroed behind the first batch": ("DPF-L13", "l0la", "bzbbS", {}),
    "zeroed before each batch, and scaled": ("DPF-L13", "l0a", "zsbzsbuS", {}),
    "clipped before the step of the scaler": ("DPF-L14", "a", "zsbcuS", {}),
    "clipped before unscaling, and again behind it": ("DPF-L14", "la", "zsbsbcucuS", {}),
    "a schedule behind each batch": ("DPF-L15", "la", "lzblbS", {}),
    "a schedule before each batch": ("DPF-L15", "lla", "zlblblbS", {}),
    "averaged, and again by hand": ("again", "a", "zbaaS", {}),
    "averaged with a window, and again by hand": ("again", "la", "zbbaS", {}),
}
RIGHT = {
    "averaged by hand": ("l", "zbaS", {}),
    "averaged by hand in the window": ("la", "zbabS", {}),
    "zeroed": ("a", "bSz", {"old": True}),
    "zeroed in place": ("a", "zbS", {}),
    "dropped by hand": ("a", "hbS", {"old": True}),
    "empty": ("a", "bS", {}),
    "zeroed by hand behind a backward of another model": ("a0a", "bbS", {"old": True}),
    "another optimizer beside it": ("l0a", "zbzbS", {"optimizers": 1}),
    "a part is zeroed": ("l0a", "zbzbS", {"whole": ()}),
    "a backward at another line": ("l0a", "zbzBS", {}),
    "written before the step": ("l0a", "zbzbhS", {}),
    "zeroed before the step, and then written": ("l0a", "zbzbzhS", {}),
    "in a closure": ("l0a", "Szbzb", {}),
    "a scaler that skips steps": ("a0a", "zbuzbuS", {}),
    "nothing is lost": ("la", "bzbS", {}),
    "clipped behind unscaling": ("a", "zsbucuS", {}),
    "a scale that is not used": ("a", "zbcuS", {}),
    "a limit from the scale": ("a", "zsbgcuS", {}),
    "clipped, and not of this optimizer": ("a", "zsbCuS", {}),
    "clipped, and another optimizer is unscaled": ("a", "zsbcUS", {}),
    "clipped before the last backward": ("la", "zsbcsbuS", {}),
    "without a step of the scaler": ("a", "zsbcS", {}),
    "a schedule behind each step": ("la", "zbbSl", {}),
    "a schedule behind a step of one batch": ("a", "zbSl", {}),
    "two schedules behind each step": ("la", "zbbSll", {}),
    "a schedule inside each window": ("la", "zblbS", {}),
    "a schedule, and a scaler that skips steps": ("a0a", "zbulzbuSl", {}),
    "a schedule of another optimizer": ("la", "zblblS", {"optimizers": 1}),
}


def of_table(text, calls, options):
    options = dict(options)
    optimizers = options.pop("optimizers", 0)
    return lambda count: told(turns(text, calls, count, **options), optimizers=optimizers)


@pytest.mark.parametrize(("code", "text", "calls", "options"), WRONG.values(), ids=WRONG)
def test_what_calls_show_is_told_as_soon_as_there_are_enough_steps(code, text, calls, options):
    say = of_table(text, calls, options)
    enough = {**STEPS, "again": averaged_twice.AGAIN + 1}[code]
    assert say(enough) == [code]
    assert say(enough - 1) == []


@pytest.mark.parametrize(("text", "calls", "options"), RIGHT.values(), ids=RIGHT)
def test_what_may_be_right_is_not_told(text, calls, options):
    assert of_table(text, calls, options)(50) == []


def test_a_row_of_steps_begins_again_where_one_of_them_is_right():
    wrong, right = turns("a", "bS", 8, old=True), turns("a", "zbS", 1)
    assert told([*wrong, *right] * 3) == []
    traces = traces_of(*wrong, *right, *turns("a", "bS", 12, old=True))
    assert l12_never_zeroed.find(traces).step == 10
    assert "from step 10 to 17 (train.py:83), and nothing zeroed its gradients" in l12_never_zeroed.find(traces).text
    assert told([*turns("l0la", "bzbbS", 4), *turns("l0l0a", "zbzbzbS", 4)[1:]]) == []  # other numbers are lost


def test_batches_that_are_trained_on_as_well_are_not_lost():
    windows = turns("l0a", "zbzbS")
    traces = traces_of(*windows)
    assert l13_zeroed_in_window.find(traces) is not None
    for trace in traces.values():
        for line in trace.steps:
            line["forwards"][1] = line["forwards"][0]
    assert l13_zeroed_in_window.find(traces) is None


def test_a_mean_by_hand_over_more_ranks_than_those_of_the_wrapper_is_no_second_one():
    traces = traces_of(*turns("a", "zbaS"))
    assert averaged_twice.find(traces) is not None
    traces[0].models[0]["ranks"] = 1
    assert averaged_twice.find(traces) is None


def test_gradients_at_other_weights_are_not_lost():
    traces = traces_of(*turns("l0a", "zbzbS"))
    for number, forward in enumerate(traces[0].steps[1]["forwards"]):
        forward["weights"] = {"0": f"{number}"}
    assert l13_zeroed_in_window.find(traces) is None


# --- What the doctor hears ---

TRAIN = """
import dpfuse
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LambdaLR, SequentialLR, StepLR

net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
head = torch.optim.SGD(net[1].parameters(), lr=0.1)
scaler = {scaler}
schedule = {schedule}

def backward():
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()

optimizer.step()
head.step()
for step in range(9):
    {loop}
"""
ON = "torch.amp.GradScaler('cpu', init_scale=8.0)"
OFF = "torch.amp.GradScaler('cpu', enabled=False)"
SCHEDULES = {
    "one": "LambdaLR(optimizer, lambda step: 1)",
    "chained": "ChainedScheduler([StepLR(optimizer, 2), ConstantLR(optimizer)])",
    "sequential": "SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 2)], milestones=[2])",
    "of a plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
}


def heard(folder, loop, wrapper="torch", scaler=OFF, schedule=SCHEDULES["one"]):
    """What the last step of the first optimizer has in its trace: each call, and of which optimizers it is."""
    lines = "\n    ".join(loop.split("; "))
    found = observed(
        folder, wrapper, "net", f"{GROUP}\n{TRAIN.format(loop=lines, scaler=scaler, schedule=schedule)}", steps=4
    )
    trace = read_folder(folder)[0]
    assert (len(trace.steps) >= 4, found.said) == (True, ""), found.error
    return trace.steps[-1]["calls"]


def kinds(calls):
    return [call["what"] for call in calls]


@pytest.mark.parametrize("wrapper", ["torch", "dpfuse"])
def test_calls_around_a_step_are_heard_in_their_order(wrapper, tmp_path):
    loop = (
        "model.zero_grad(); backward(); scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0); "
        "scaler.step(optimizer); scaler.update(); schedule.step()"
    )
    calls = heard(tmp_path, loop, wrapper, ON)
    assert kinds(calls) == ["schedule", "zero", "scale", "backward", "unscale", "clip", "unscale", "step"]
    assert [call["of"] for call in calls if call["what"] not in ("scale", "backward")] == [[0, 1]] * 6
    lines = [int(re.fullmatch(r"<string>:(\d+)", call["at"])[1]) for call in calls[1:]]
    first = lines[0]
    assert lines[3:] == [first + 2, first + 3, first + 4, first + 4]
    assert calls[1]["whole"] == [0, 1]


@pytest.mark.parametrize(
    ("call", "of", "whole"),
    [
        ("head.zero_grad()", [0, 1], [1]),
        ("net[0].zero_grad()", [0], []),
        ("clip_grad_norm_(net[0].weight, 1.0)", [0], []),
    ],
    ids=["of the head", "of the body", "of one tensor"],
)
def test_the_optimizers_that_a_call_is_about_are_noted(call, of, whole, tmp_path):
    calls = heard(tmp_path, f"backward(); {call}; optimizer.step()")
    assert kinds(calls)[0::2] == ["backward", "step"]
    assert (calls[1]["of"], calls[1]["whole"]) == (of, whole)


ZEROED = "assert not any(param.grad.any() for param in net.parameters()); optimizer.step()"
ZEROS = f"backward(); clip_grad_value_(clip_value=0.0, parameters=net.parameters()); {ZEROED}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("backward(); optimizer.step()", ["backward", "step"]),
        ("backward(); clip_grad_value_(net.parameters(), 0.1); optimizer.step()", ["backward", "clip", "step"]),
        (ZEROS, ["backward", "clip", "step"]),
        ("backward(); clip_grad_norm_(net.parameters(), torch.inf); optimizer.step()", ["backward", "step"]),
        ("net[0].weight.grad = None; backward(); optimizer.step()", ["by hand", "backward", "step"]),
        ("backward(); net[0].weight.grad.mul_(0.5); optimizer.step()", ["backward", "by hand", "step"]),
        ("optimizer.zero_grad(set_to_none=False); backward(); optimizer.step()", ["zero", "backward", "step"]),
        ("backward(); scaler.unscale_(optimizer); scaler.step(optimizer)", ["backward", "step"]),
    ],
    ids=["nothing", "clipping", "by name", "a norm only", "dropped by hand", "scaled by hand", "zeros", "scaler off"],
)
def test_what_is_done_by_hand_is_told_from_what_torch_does(loop, expected, tmp_path):
    assert kinds(heard(tmp_path, loop)) == expected


@pytest.mark.parametrize("scaler", ["dpfuse.GradScaler(model=model)", "torch.amp.GradScaler('cpu', init_scale=1.0)"])
def test_a_scale_that_gradients_do_not_keep_is_no_call(scaler, tmp_path):
    loop = "backward(); clip_grad_norm_(net.parameters(), 1.0); scaler.step(optimizer); scaler.update()"
    calls = heard(tmp_path, loop, "dpfuse", scaler)
    assert kinds(calls) == ["backward", "clip", "unscale", "step"]


def test_a_compiled_function_is_compiled_as_without_a_doctor(tmp_path):
    loop = "backward(); torch.compile(clip_grad_norm_, backend='eager', fullgraph=True)([*net.parameters()], 1.0)"
    assert kinds(heard(tmp_path, f"{loop}; optimizer.step()")) == ["backward", "by hand", "step"]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_step_of_a_schedule_is_one_call_whatever_it_steps(schedule, tmp_path):
    step = "schedule.step(1.0)" if "Plateau" in schedule else "schedule.step()"
    loop = f"backward(); optimizer.step(); {step}; LambdaLR(optimizer, lambda step: 1)"
    assert kinds(heard(tmp_path, loop, schedule=schedule)) == ["schedule", "backward", "step"]


# --- Programs ---

SAID = {case.program.removeprefix("planted.py "): case.said for case in PLANTED}
WAYS = {"torch": "torch", "dpfuse": "dpfuse"}


def remarks(folder, file, name, wrapper):
    """What is said of a program of one rank."""
    start = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import {file}; {file}.PROGRAMS[{name!r}](0, 1)"
    found = observed(folder, wrapper, "net", f"{GROUP}\n{start}", steps=20)
    assert (found.code, found.said) == (0, ""), found.error
    return {one.code: one for one in remarks_of([run_of(folder, 1, wrapper)], None) if one.code in LOOKS}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrapper", WAYS)
@pytest.mark.parametrize("name", OF_CALLS)
def test_a_wrong_program_is_named_with_its_line_and_step(name, wrapper, tmp_path):
    found = remarks(tmp_path, "planted", name, wrapper)
    code, step = OF_CALLS[name]
    assert list(found) == [code]
    assert re.match(SAID[name], f"{code}: {found[code].text}"), found[code].text
    assert found[code].step == step


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrapper", WAYS)
@pytest.mark.parametrize("name", NEAR)
def test_a_right_program_that_comes_near_is_left_alone(name, wrapper, tmp_path):
    assert remarks(tmp_path, "healthy", name, wrapper) == {}
