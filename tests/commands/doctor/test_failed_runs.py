"""A program that fails under DDP: what dpfuse says of it, or survives."""

from __future__ import annotations

import pytest

from dpfuse.commands.doctor.failed_runs import outcome, reasons
from dpfuse.commands.doctor.findings import findings_of
from tests.commands.doctor.cases import PLANTED, examine
from tests.commands.doctor.made import plain_facts, timed

ERROR = {"what": "error", "kind": "DPFuseError", "code": "", "text": "rank 0 waits for bucket 0 (waiting.py:3)"}


def of_ranks(run, *facts):
    run.facts = {str(rank): plain_facts(**each) for rank, each in enumerate(facts)}
    return run


def test_a_program_that_fails_under_ddp_is_diagnosed_by_what_dpfuse_says(tmp_path):
    case = next(case for case in PLANTED if case.program == "planted.py fewer_batches_on_rank_1")
    diagnosis = examine(case, tmp_path)
    assert not diagnosis.complaints, diagnosis.terminal


def test_an_error_of_dpfuse_is_the_reason():
    run = of_ranks(timed(2, "dpfuse"), {"findings": [{**ERROR, "kind": "RuntimeError"}]}, {"findings": [ERROR]})
    run.code = 1
    (found,) = reasons(run)
    assert (found.title, found.rank) == ("an error of dpfuse", 1)
    assert found.text == "rank 1 raised DPFuseError: rank 0 waits for bucket 0 (waiting.py:3)"
    assert outcome(run) == "under dpfuse, in run 2, an error of dpfuse ends it, which says why"
    of_ranks(run, {"findings": [{**ERROR, "kind": "ValueError", "text": "mine"}]}, {})
    assert list(reasons(run)) == []
    assert outcome(run) == "under dpfuse, in run 2, it fails as well: rank 0 raised ValueError: mine"


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (({"train.py:9": 3}, {}), "3 on rank 0, 0 on rank 1 times (train.py:9)"),
        (({}, {"train.py:9": 1, "train.py:12": 1}), "0 on rank 0, 2 on rank 1 times (train.py:9)"),
        (({"train.py:9": 3}, {"train.py:9": 3}), ""),
        (({}, {}), ""),
    ],
)
def test_calls_on_some_ranks_alone_are_the_reason_where_dpfuse_trains(calls, told):
    run = of_ranks(timed(2, "dpfuse"), *({"evaluated": each} for each in calls))
    found = list(reasons(run))
    assert [one.title for one in found] == ["some ranks alone call the model"] * bool(told)
    assert all(told in one.text for one in found)
    assert outcome(run) == "under dpfuse, in run 2, it makes all its 12 steps"


def test_of_other_learning_rates_each_rank_has_its_own():
    note = {"what": "warning", "kind": "LoopWarning", "code": "DPF-L07", "text": "DPF-L07: rank 0: in 2 steps"}
    run = of_ranks(timed(2, "dpfuse"), {"findings": [note]}, {})
    for rank, trace in run.traces.items():
        trace.optimizers[0]["class"] = "SGD"
        for step, line in enumerate(trace.steps):
            line["settings"] = [{"lr": "0.1"}, {"lr": str(0.2 + (rank if step > 3 else 0))}]
    (found,) = findings_of([run])
    assert "of SGD differ between ranks, first in step 4: rank 0 has 0.1, 0.2, rank 1 has 0.1, 1.2." in found.text
