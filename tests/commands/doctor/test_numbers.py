"""Same numbers? Judged on trainings on real ranks, with differences that are planted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dpfuse.commands.doctor.runs import Run
from dpfuse.commands.doctor.same_numbers import _apart, judge, losses_of
from dpfuse.trace_file import RankTrace
from tests.commands.doctor.made import run_of, timed
from tests.trace.training import PLANTS, train

# Of each run: the wrapper, a plant or none.
HEALTHY = [("torch", ""), ("dpfuse", ""), ("torch", ""), ("dpfuse", "")]


def trained(rank: int, size: int, folder: Path, runs: list[tuple[str, str]], cap: float) -> None:
    for number, (wrapper, name) in enumerate(runs, start=1):
        plant = PLANTS[name][-1] if name else None
        options = {"bucket_cap_mb": cap} if wrapper == "torch buckets" else {}
        wrap = "dpfuse" if wrapper == "dpfuse" else "torch"
        train(folder / str(number), wrap, plant, sketch=size > 2, deep=2, **options)


@pytest.fixture
def judged(ranks, tmp_path):
    def make(runs, resumed=(), size=2, cap=0.0001):
        ranks(trained, tmp_path, runs, cap, size=size)
        made = [run_of(tmp_path / str(number), number, wrapper) for number, (wrapper, _) in enumerate(runs, start=1)]
        of = {name: [run for run in made if run.wrapper == name] for name in ("torch", "dpfuse", "torch buckets")}
        return judge(of["torch"], of["dpfuse"], next(iter(of["torch buckets"]), None), resumed)

    return make


def test_nothing_is_concluded_from_an_argument_that_torchs_class_does_not_have(ranks, tmp_path):
    runs = [("torch", ""), ("dpfuse", "narrow_wire"), ("torch", "")]
    ranks(trained, tmp_path, runs, 0.0001)
    first, ours, again = [run_of(tmp_path / str(1 + n), 1 + n, wrapper) for n, (wrapper, _) in enumerate(runs)]
    ours.facts["0"]["numeric"] = ["wire_dtype"]
    found = judge([first, again], [ours], None, ())
    assert found.result == "unknown"
    assert "The program passes wire_dtype, which torch's class does not have" in found.text


def test_two_ranks_are_equal_bit_for_bit(judged):
    found = judged(HEALTHY)
    assert (found.result, found.fine, found.steps) == ("equal", True, 5)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("another_backward", "gradient"),  # behind the deep steps, which of the gradients differs first is not known
        ("narrow_wire", "communication"),
        ("wrong_once", "gradient"),
        ("another_clip", "optimizer"),
        ("one_label", "data"),
        ("weights_changed_between_steps", "forward"),  # neither are those hashed there
        ("another_lr", "settings"),
    ],
)
def test_a_difference_under_dpfuse_alone_is_named(name, cause, judged):
    found = judged([("torch", ""), ("dpfuse", name), ("torch", ""), ("dpfuse", name)])
    assert found.result == "different"
    assert not found.fine
    assert found.difference.step == PLANTS[name][1]
    assert f"(class: {cause})" in found.text


@pytest.mark.parametrize("place", [2, 3], ids=["under DDP", "under dpfuse"])
def test_a_program_that_differs_from_itself_is_told_so(place, judged):
    runs = [*HEALTHY]
    runs[place] = (runs[place][0], "one_number_of_a_batch")
    found = judged(runs)
    assert found.result == "itself"
    assert "step 3, micro-batch 0 of 2, rank 1: the inputs of the forward (class: data)" in found.text


def test_a_run_that_starts_from_what_another_one_wrote_voids_the_comparison(judged):
    runs = [HEALTHY[0], *((wrapper, "loaded_weights") for wrapper, _ in HEALTHY[1:])]
    found = judged(runs, resumed=["saved/checkpoint.pt", "saved/more.pt"])
    assert (found.result, found.fine) == ("void", False)
    assert "saved/checkpoint.pt and 1 more" in found.text


def test_files_that_were_read_again_void_nothing_where_the_numbers_are_equal(judged):
    assert judged(HEALTHY, resumed=["cache/data.bin"]).result == "equal"


def test_three_ranks_may_lie_as_far_from_ddp_as_ddp_with_other_buckets(judged):
    found = judged([*HEALTHY, ("torch buckets", "")], size=3)
    assert found.result in ("equal", "close")
    assert found.fine


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another_lr", "the optimizer's lr of group 0: 0.01 and 0.02"),
        ("no_clip", "Farther than rounding explains"),
        pytest.param("narrow_wire", "Farther than rounding explains", marks=pytest.mark.slow),
        pytest.param("all_labels_from_the_start", "Farther than rounding explains", marks=pytest.mark.slow),
    ],
)
def test_three_ranks_that_lie_farther_are_different(name, words, judged):
    runs = [(wrapper, name if wrapper == "dpfuse" else "") for wrapper, _ in HEALTHY]
    found = judged([*runs, ("torch buckets", "")], size=3)
    assert found.result == "different", found
    assert words in found.text


@pytest.mark.parametrize("ended", ["failed", "without a step", "not run"])
@pytest.mark.parametrize("lr", [0.1, 0.2])
def test_three_ranks_cannot_be_judged_without_the_run_of_ddp_with_other_buckets(lr, ended):
    runs = [timed(number, wrapper, ranks=3) for number, wrapper in enumerate(("torch", "dpfuse"), 1)]
    for run in runs:
        for trace in run.traces.values():
            rate = [{"lr": 0.1 if run.wrapper == "torch" else lr}]
            trace.steps = [{**line, "settings": rate, "parameters": run.wrapper.ljust(8)} for line in trace.steps]
            trace.models, trace.optimizers[0]["names"] = [], ["weight"]
    other = Run(5, "torch buckets", int(ended == "failed"), 1.0, Path("log"), last_line="TypeError: twice")
    found = judge(runs[:1] * 2, runs[1:], None if ended == "not run" else other, [])
    if lr == 0.1:
        assert found.result == "unknown"
        assert "first at step 0, rank 0: the parameter after the step, weight" in found.text
        reason = {"failed": "it has failed: exit code 1: TypeError: twice.", "not run": "there was none."}
        assert found.text.endswith(f"would tell, and {reason.get(ended, 'it has made no step.')}")
    else:
        assert (found.result, found.difference.cause) == ("different", "settings")


@pytest.mark.parametrize("sketches", [[math.nan], [math.inf]])
def test_gradients_that_are_not_finite_under_dpfuse_alone_are_different(sketches):
    runs = {wrapper: timed(number, wrapper, ranks=3) for number, wrapper in enumerate(("torch", "dpfuse", "other"), 1)}
    for wrapper, run in runs.items():
        for trace in run.traces.values():
            values = sketches if wrapper == "dpfuse" else [1.0]
            lines = {"gradient sketch": values, "settings": [], "parameters": wrapper.ljust(8)}
            trace.steps = [{**line, **lines} for line in trace.steps]
            trace.models, trace.optimizers[0]["names"] = [], ["weight"]
    found = judge([runs["torch"]] * 2, [runs["dpfuse"]], runs["other"], [])
    assert found.result == "different"
    assert judge([runs["torch"]], [runs["torch"]], runs["other"], []).result == "equal"


def test_an_optimizer_that_gets_parameters_in_another_step_of_each_run_differs_in_its_settings():
    runs = {wrapper: timed(number, wrapper, ranks=3) for number, wrapper in enumerate(("torch", "dpfuse", "other"), 1)}
    for begin, run in enumerate(runs.values(), start=3):
        for trace in run.traces.values():
            trace.models, trace.optimizers[0]["names"] = [], ["weight", "bias"]
            for number, line in enumerate(trace.steps):
                count = 1 + (number >= begin)
                line |= {"gradient sketch": [1.0] * count, "settings": [{}] * count, "parameters": "12345678" * count}
    found = judge([runs["torch"]] * 2, [runs["dpfuse"]], runs["other"], [])
    assert (found.result, found.difference.cause, found.difference.step) == ("different", "settings", 3)
    assert "number of groups: 2 and 1" in found.text


def test_a_loss_of_nan_is_far_from_a_finite_one():
    assert _apart(math.nan, 1.0) == _apart(1.0, math.inf) == math.inf
    assert _apart(math.nan, math.nan) == _apart(2.0, 2.0) == 0.0
    assert _apart(1.0, 2.0) == 0.5
    assert losses_of(RankTrace(steps=[{"optimizer": 0, "backwards": [{"value": "nan"}]}]))[0] != 1.0


def test_where_ddp_was_run_once_a_difference_may_be_the_programs_own():
    torch_run, ours = timed(1, "torch"), timed(2, "dpfuse")
    for run in (torch_run, ours):
        for trace in run.traces.values():
            trace.steps = [{**line, "settings": [], "parameters": run.wrapper.ljust(8)} for line in trace.steps]
            trace.models, trace.optimizers[0]["names"] = [], ["weight"]
    found = judge([torch_run], [ours], None, [])
    assert (found.result, found.difference.step) == ("unknown", 0)
    assert "run once under DDP, so it cannot be said whether it differs from itself" in found.text
    assert judge([torch_run] * 2, [ours], None, []).result == "different"
    assert judge([torch_run], [torch_run], None, []).result == "equal"


def test_without_a_step_nothing_is_said():
    empty = [Run(number, wrapper, 0, 1.0, Path("log")) for number, (wrapper, _) in enumerate(HEALTHY, start=1)]
    assert judge(empty[::2], empty[1::2], None, []).result == "unknown"
