"""A step on NaN or infinite values: where it is told, and what a program has skipped is none."""

from __future__ import annotations

import json

import pytest

from dpfuse.commands.doctor.findings import findings_of
from dpfuse.commands.doctor.page import page
from dpfuse.commands.doctor.summary import summary
from dpfuse.rules import not_finite
from tests.commands.doctor.made import NAMES, timed
from tests.commands.doctor.test_report import report

ALL = {"stepped": [0, 1], "parameters": [0, 1]}


def training(number=1, wrapper="torch", ranks=2):
    """A run of 12 steps with two finite losses before each."""
    run = timed(number, wrapper, ranks=ranks, forward=0.1)
    for trace in run.traces.values():
        trace.models[0]["names"], trace.optimizers[0] = NAMES, {"class": "SGD", "names": NAMES}
        trace.steps = [
            {**line, "backwards": [{"value": 1 / (1 + step)}, {"value": 1 / (1 + step)}]}
            for step, line in enumerate(trace.steps)
        ]
    return run


def plant(run, rank, step, loss=None, own=(), backward=-1, **fields):
    """Make values of one step of a rank NaN or infinite."""
    line = run.traces[rank].steps[step]
    if loss is not None:
        line["backwards"][backward]["value"] = loss
    if own:
        line["backwards"][backward]["not finite"] = {"0": list(own)}
    if fields:
        line["not finite"] = fields


def overflowed(number=1, wrapper="torch"):
    """A run whose loss is infinite in step 3 on rank 1, and NaN everywhere from then on."""
    run = training(number, wrapper)
    plant(run, 1, 3, "inf", own=[0, 1], **ALL)
    plant(run, 0, 3, **ALL)
    for step in range(4, 12):
        for rank in (0, 1):
            plant(run, rank, step, "nan", own=[0, 1], **ALL)
    return run


def test_a_step_on_an_infinite_loss_is_a_finding_with_step_rank_and_parameter():
    runs = [overflowed(1, "torch"), overflowed(2, "dpfuse")]
    runs[1].facts["0"]["findings"] = [{"what": "warning", "kind": "LoopWarning", "code": "DPF-L01", "text": "rest"}]
    found, other = findings_of(runs)
    assert (found.title, found.step, found.rank, found.parameter) == (
        "not finite since step 3, rank 1",
        3,
        1,
        "weight",
    )
    assert found.text.startswith(
        "in step 3 the loss was inf on rank 1, and SGD stepped on it: the gradient of weight, bias was not finite. "
        "At the end the loss is nan on 2 of 2 ranks and 2 of 2 parameters are not finite. Expected finite numbers"
    )
    assert found.where == ("run 1, torch DDP", "run 2, dpfuse")
    assert other.code == "DPF-L01"  # it comes behind


def test_what_is_not_finite_is_in_the_headline_the_plot_and_the_json():
    runs = [overflowed(1, "torch"), overflowed(2, "dpfuse")]
    made = report(findings=findings_of(runs), runs=runs)
    assert made.exit_code == 1
    assert "what is wrong?   not finite since step 3, rank 1: in step 3 the loss was inf on rank 1" in summary(made)
    text = page(made)
    assert '<b class="bad">not finite since step 3, rank 1</b>' in text
    assert "<figcaption>loss of rank 1</figcaption>" in text  # that of rank 0 is finite in step 3
    assert "not finite from step 3</text>" in text
    (found,) = json.loads(json.dumps(made.to_json(), allow_nan=False))["findings"]
    assert (found["step"], found["rank"], found["parameter"]) == (3, 1, "weight")


def test_the_plot_of_a_loss_of_the_second_optimizer_is_its_own():
    run = training()
    for trace in run.traces.values():
        trace.optimizers.append({"class": "Adam", "names": ["1:weight"]})
        for line in trace.steps[1::2]:
            line["optimizer"] = 1
    for step in range(5, 12, 2):
        for rank in (0, 1):
            plant(run, rank, step, "nan")
    (found,) = findings_of([run])
    assert (found.step, found.rank) == (5, None)
    assert "in step 5 the loss was nan on all ranks. At the end the loss is nan on 2 of 2 ranks." in found.text
    assert "not finite from step 5</text>" in page(report(findings=[found], runs=[run]))


def test_what_was_skipped_is_no_finding():
    run = training()
    plant(run, 1, 3, "inf", own=[0, 1], backward=0)  # the step that comes is of the backward behind it
    plant(run, 0, 5, "inf", own=[0, 1], skipped=True)  # a fused optimizer has left it out
    assert findings_of([run]) == ()
    assert not_finite.first_in_backward(run.traces) == "the loss on rank 1, before step 3"
    assert "not finite" not in page(report(runs=[run]))


@pytest.mark.parametrize(
    ("plants", "rank", "parameter", "text"),
    [
        (
            [(1, {"own": [1], "backward": 0, "stepped": [1]}), (0, {"stepped": [1], "parameters": [1]})],
            1,
            "bias",
            "in step 4 the gradient of bias was not finite on rank 1, and SGD stepped on it.",
        ),
        (
            [(0, {"stepped": [0]}), (1, {"stepped": [0]})],
            None,
            "weight",
            "in step 4 SGD stepped on a gradient of weight that was not finite on all ranks, though those that the "
            "ranks had computed were finite.",
        ),
        (
            [(1, {"stepped": [0]})],
            1,
            "weight",
            "in step 4 SGD stepped on a gradient of weight that was not finite on rank 1, though those that the ranks ",
        ),
        (
            [(0, {"parameters": [1], "own": [0], "backward": 0}), (1, {"parameters": [1]})],
            None,
            "bias",
            "step 4 of SGD made bias NaN or infinite on all ranks, from gradients that were finite",
        ),
        ([(0, {"loss": "nan"}), (1, {"loss": "nan"})], None, "", "in step 4 the loss was nan on all ranks."),
        ([(1, {"loss": "-inf"})], 1, "", "in step 4 the loss was -inf on rank 1. At the end loss and weights are fin"),
    ],
    ids=["a gradient", "the average", "one rank's own", "weights", "all ranks", "the loss alone"],
)
def test_where_it_begins(plants, rank, parameter, text):
    run = training()
    for number, values in plants:
        plant(run, number, 4, **values)
    found = not_finite.find(run.traces)
    assert found is not None
    assert (found.step, found.rank, found.parameter) == (4, rank, parameter)
    assert found.text.startswith(text)


def test_one_rank_alone_is_named():
    run = training(ranks=1)
    plant(run, 0, 2, "nan", own=[0])
    found = not_finite.find(run.traces)
    assert found is not None
    assert found.title == "not finite since step 2, rank 0"


def test_it_is_told_of_a_run_that_has_failed_later_and_of_ranks_that_made_fewer_steps():
    run = overflowed()
    run.code = 1
    del run.traces[0].steps[3:]
    (found,) = findings_of([run])
    assert (found.step, found.rank) == (3, 1)
    made = report(None, [found], [run], failure="it fails", failed_under="torch")
    assert "what is wrong?   not finite since step 3, rank 1" in summary(made)
