"""Checks that had too few steps to say anything are told, with what they need; and what is told is true."""

from __future__ import annotations

import pytest

from dpfuse.commands.doctor.page import page
from dpfuse.commands.doctor.runs import RunSetup, run_once
from dpfuse.commands.doctor.summary import summary
from dpfuse.commands.doctor.too_few_steps import AVERAGES, STEPS, too_few_steps
from dpfuse.commands.run_command import Program
from tests.commands.doctor.made import plain_facts, timed, traces_of, window
from tests.commands.doctor.test_report import report
from tests.commands.programs import PROGRAMS


def run_with(steps, text="a", **facts):
    run = timed(2, "dpfuse")
    run.traces = traces_of(*[window(text) for _ in range(steps)])
    run.facts = {"0": plain_facts(**facts)}
    return run


def codes(told):
    return [one.partition(" ")[0] for one in told]


def test_what_needs_more_steps_is_told_with_what_it_had():
    assert codes(too_few_steps([run_with(12)], [])) == ["DPF-L02", "DPF-L04"]
    assert too_few_steps([run_with(12)], ["DPF-L04"]) == (f"DPF-L02 needs {STEPS['DPF-L02']} steps, had 12",)
    assert codes(too_few_steps([run_with(4), run_with(60)], [])) == [
        "DPF-L02",
        "DPF-L03",
        "DPF-L04",
        "DPF-L05",
        "DPF-L07",
        "DPF-L08",
        "DPF-L12",
        "DPF-L13",
        "DPF-L15",
    ]
    assert too_few_steps([run_with(50)], []) == ()


def test_an_optimizer_that_may_begin_late_is_waited_for():
    run = run_with(50)
    for line in run.traces[0].steps[:2]:
        line["backwards"][0]["averaged"] = {"0": "0" * 8 + "1" * 8}
    assert too_few_steps([run], []) == ()
    for trace in run.traces.values():
        trace.optimizers[0]["names"] = ["weight"]
    assert too_few_steps([run], []) == ("DPF-L04 needs 1,003 steps, had 50",)
    for line in run.traces[0].steps[:2]:
        line["backwards"][0]["averaged"] = {"0": "0" * 8 + "-" * 8}  # the bias got no gradient
    assert too_few_steps([run], []) == ()


def test_averaged_backwards_are_counted_where_there_are_more_than_steps():
    assert codes(too_few_steps([run_with(10, "aaaa")], [])) == ["DPF-L02"]
    assert f"DPF-L04 needs {AVERAGES['DPF-L04']} averaged backwards, had 20" in too_few_steps([run_with(10, "aa")], [])


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ({"epochs": [0], "set": False}, ("DPF-L11 needs 3 passes over a sampler, had 1",)),
        ({"epochs": [0, 0, 0], "set": False}, ()),
        ({"epochs": [0], "set": True}, ()),
        ({"epochs": [0, 1], "set": False}, ()),
        ({"epochs": [], "set": False}, ()),
    ],
)
def test_a_sampler_whose_epoch_may_be_set_later_is_told_of(sampler, told):
    assert too_few_steps([run_with(50, samplers=[sampler])], []) == told


def test_it_is_in_the_terminal_the_page_and_the_json():
    made = report(too_few=("DPF-L04 needs 22 steps, had 12", "DPF-L02 needs 20 steps, had 12"))
    words = "DPF-L04 needs 22 steps, had 12; DPF-L02 needs 20 steps, had 12"
    assert f"too few steps    {words}" in summary(made)
    assert f"<p>Too few steps for some checks: {words}.</p>" in page(made)
    assert made.to_json()["too few steps"] == list(made.too_few)


FROM_THE_START = f"""
import sys
sys.path.insert(0, {str(PROGRAMS)!r})
import torch
from torch.nn.parallel import DistributedDataParallel
from training import batches, loss_of, net, run, trained

def other_rates(rank, size):
    train(*trained(0.01 * (1 + rank)))

def other_modes(rank, size):
    model, optimizer = trained()
    train(model.train(rank == 0), optimizer)

def other_copy(rank, size):
    model = DistributedDataParallel(net())
    train(model, torch.optim.SGD(net().parameters(), lr=0.01))

def train(model, optimizer):
    for x, y in batches():
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

run({{"other_copy": other_copy, "other_rates": other_rates, "other_modes": other_modes}})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("whole_training_in_no_sync", "DPF-L02"),
        ("other_copy", "DPF-L04"),
        ("loader_without_a_distributed_sampler", "DPF-L05"),
        ("other_rates", "DPF-L07"),
        ("other_modes", "DPF-L08"),
    ],
)
def test_so_many_steps_are_enough_and_fewer_are_not(name, code, tmp_path):
    program = PROGRAMS / "planted.py"
    if name.startswith("other"):
        program = tmp_path / "program.py"
        program.write_text(FROM_THE_START)
    need = {**AVERAGES, **STEPS}[code]
    one_more_on_a_gpu = code in ("DPF-L05", "DPF-L07", "DPF-L08")
    for steps, told in ((need, True), (need - 1 - one_more_on_a_gpu, False)):
        folder = tmp_path / str(steps)
        folder.mkdir()
        setup = RunSetup(Program(str(program), (name,)), 2, False, steps, 2, 60.0, folder)
        run = run_once(setup, 1, "dpfuse", lambda text: None)
        assert run.steps == steps, run.log.read_text()
        assert (code in {note["code"] for note in run.facts["0"]["findings"]}) == told
