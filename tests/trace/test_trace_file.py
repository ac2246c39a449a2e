"""The variable, the files, and what is wrong with them."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.trace.comparison import compare
from dpfuse.trace.process_trace import start_tracer, stop_tracer
from dpfuse.trace_file import ABSENT, behind_hooks, hashes_in, read_folder
from tests.distributed.processes import clean_environment, run
from tests.patience import patience
from tests.torch_ddp import torch_ddp


@pytest.fixture
def traced(group, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFUSE_TRACE", str(tmp_path / "new" / "folder"))
    yield tmp_path / "new" / "folder"
    stop_tracer()


def step(model, optimizer):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_variable_traces_every_wrapper_and_optimizer(traced):
    first, second = nn.Linear(4, 2), nn.Linear(4, 3, bias=False)
    models = [dpfuse.DataParallel(first), dpfuse.DistributedDataParallel(second)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    (trace,) = read_folder(traced).values()
    assert [model["names"] for model in trace.models] == [["weight", "bias"], ["weight"]]
    assert [line["optimizer"] for line in trace.steps] == [0, 1, 0, 1]
    assert trace.optimizers[1]["names"] == ["1:weight"]
    assert trace.steps[0]["plan"]["0"] == [["weight", "bias"]]
    (backward,) = trace.steps[1]["backwards"]
    assert list(backward["local"]) == list(backward["averaged"]) == ["1"]
    assert backward["local"] == backward["averaged"]  # one rank: its gradient is the average
    assert trace.steps[1]["stepped"] == backward["averaged"]["1"]
    assert trace.steps[0]["parameters"] != trace.steps[2]["parameters"]
    assert not any("calls" in line for line in trace.steps)  # only the doctor asks for them
    assert set(trace.steps[0]["times"]) == {
        "outside",
        "loader",
        "forward",
        "backward",
        "optimizer",
        "device",
        "tracing",
    }


def test_backwards_tell_what_they_find_in_gradients_and_no_comparison_reads_it(traced):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    params, optimizer = [*model.parameters()], torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (0.5, 1.0):
        with model.no_sync():
            model(torch.randn(3, 4)).sum().backward()
        for param in params:
            param.grad *= factor
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        torch.autograd.grad(model(torch.randn(3, 4)).sum(), params)  # is no backward, and leaves nothing
    first, second = (line["backwards"] for line in read_folder(traced)[0].steps)
    for backwards, at_begin in ((first, []), (second, [0, 0])):
        assert [one["held"] for one in backwards] == [{"0": at_begin}, {"0": [1, 1]}]
    assert [one.get("left") for one in first] == [{"0": [1, 1]}, None]
    assert [one.get("left") for one in second] == [None, None]  # the forward of `grad()` has asked for an average
    assert [one.get("rescaled") for one in first] == [None, {"0": [0]}]  # a bias of two elements cannot tell
    assert [one.get("rescaled") for one in second] == [None, None]
    old = read_folder(traced)
    for backward in (one for line in old[0].steps for one in line["backwards"]):
        for name in ("held", "left", "rescaled"):
            backward.pop(name, None)
    assert compare(read_folder(traced), old) is compare(old, read_folder(traced)) is None


@pytest.mark.parametrize("face", [dpfuse.DataParallel, torch_ddp])
def test_the_forward_decides_whether_a_backward_is_averaged(face, traced):
    model = face(nn.Linear(4, 2))
    if face is torch_ddp:
        start_tracer(traced).add(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for context in (model.no_sync, nullcontext):
        with context():
            loss = model(torch.randn(3, 4)).sum()
        with nullcontext() if context is model.no_sync else model.no_sync():
            loss.backward()
    optimizer.step()
    (line,) = read_folder(traced)[0].steps
    assert [("left" in one, "averaged" in one) for one in line["backwards"]] == [(True, False), (False, True)]


def test_an_optimizer_that_gets_parameters_has_their_names(traced):
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    model = dpfuse.DataParallel(net, check_training="off")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
    for number in range(3):
        model(torch.randn(3, 4)).sum().backward()
        for optimizer in optimizers[: 1 + (number == 0)]:
            optimizer.step()
        if number == 1:
            optimizers[0].add_param_group({"params": net[1].parameters()})
    traces = read_folder(traced)
    assert [one["names"] for one in traces[0].optimizers] == [
        ["0.weight", "0.bias", "1.weight", "1.bias"],
        ["1.weight", "1.bias"],
    ]
    assert [len(hashes_in(line["parameters"])) for line in traces[0].steps] == [2, 2, 2, 4]


def zero(param):
    param.grad.zero_()


def test_gradients_are_hashed_behind_hooks_of_the_program_too(traced):
    net = nn.Linear(4, 2)
    handles = [net.weight.register_hook(lambda grad: grad * 2)]
    model = dpfuse.DataParallel(net)
    handles += [
        net.weight.register_hook(lambda grad: grad + 1),
        net.bias.register_hook(lambda grad: None),
        net.bias.register_post_accumulate_grad_hook(lambda param: None),
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(model, optimizer)
    for handle in handles:
        handle.remove()
    step(model, optimizer)
    net.bias.register_post_accumulate_grad_hook(zero)
    step(model, optimizer)
    first, second, third = (line["backwards"][0] for line in read_folder(traced)[0].steps)
    assert behind_hooks(first) == first["averaged"]  # of one rank
    weight, bias = zip(hashes_in(first["local"]["0"]), hashes_in(first["hooked"]["0"]), strict=True)
    assert weight[0] != weight[1]
    assert bias[0] == bias[1]  # they only read
    assert second["hooked"] == {}
    assert len(net.weight._post_accumulate_grad_hooks) == 1  # the ready hook of dpfuse alone
    weight, bias = zip(hashes_in(third["local"]["0"]), hashes_in(third["hooked"]["0"]), strict=True)
    assert weight[1] == ABSENT
    assert bias[1] not in (ABSENT, bias[0])


def test_weights_are_hashed_in_each_forward_but_not_inside_the_step_of_an_optimizer(traced):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    inputs = torch.randn(3, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    model(inputs).square().mean().backward()

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    model(inputs).square().mean().backward()
    optimizer.step(closure)
    for line in read_folder(traced)[0].steps:
        assert ["weights" in one for one in line["forwards"]] == [True, *[False] * (len(line["forwards"]) - 1)]
        assert line["forwards"][0]["weights"]["0"] == line["before step"] != line["parameters"]


def test_sparse_gradients_are_looked_at_only_for_none(traced):
    model = dpfuse.DataParallel(nn.Embedding(9, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sync in (False, True):
        with nullcontext() if sync else model.no_sync():
            model(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    (line,) = read_folder(traced)[0].steps
    assert [one["held"] for one in line["backwards"]] == [{"0": []}, {"0": [1]}]
    assert [one.get("rescaled") for one in line["backwards"]] == [None, None]


class Parts(nn.Module):
    """Has parameters of two dtypes, and one that is infinite on purpose."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2).double()
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)

    def forward(self, inputs):
        return self.last(self.first(inputs).double()).float() + self.mask.exp()


LAST = 3  # the place of the bias of `last`


@pytest.mark.parametrize("finite", [True, False])
def test_what_is_not_finite_is_noted_with_its_place_where_it_is_asked_for(finite, group, tmp_path):
    net, factors = Parts(), iter([1, torch.inf, 1])
    net.last.bias.register_hook(lambda grad: grad * next(factors))
    tracer = start_tracer(tmp_path, deep_steps=1, finite=finite)  # it is noted in later steps, too
    try:
        model = torch_ddp(net)
        tracer.add(model)
        optimizer = torch.optim.SGD([*net.first.parameters(), *net.last.parameters(), net.mask], lr=0.1)
        for _ in range(3):
            step(model, optimizer)
    finally:
        stop_tracer()
    found = [(line.get("not finite"), *(one.get("not finite") for one in line["backwards"]))
             for line in read_folder(tmp_path)[0].steps]  # fmt: skip
    assert found == [
        (None, None),
        ({"parameters": [LAST], "stepped": [LAST]}, {"0": [LAST]}) if finite else (None, None),
        ({"parameters": [LAST]}, None) if finite else (None, None),
    ]


def test_sparse_gradients_that_are_not_finite_are_noted(group, tmp_path):
    tracer = start_tracer(tmp_path, finite=True)
    try:
        model = dpfuse.DataParallel(nn.Embedding(9, 3, sparse=True))
        tracer.add(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.tensor([1, 4])).sum() * torch.nan).backward()
        optimizer.step()
    finally:
        stop_tracer()
    (line,) = read_folder(tmp_path)[0].steps
    assert line["not finite"] == {"parameters": [0], "stepped": [0]}
    assert [one["not finite"] for one in line["backwards"]] == [{"0": [0]}]


def test_copies_and_pickles_of_a_traced_wrapper_are_not_traced(traced):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copy = pickle.loads(pickle.dumps(model))
    copy(torch.ones(1, 4)).sum().backward()
    step(model, optimizer)
    (trace,) = read_folder(traced).values()
    assert len(trace.models) == 1
    assert [len(line["forwards"]) for line in trace.steps] == [1]


def test_dynamo_leaves_out_the_hooks_of_a_wrapper_that_is_compiled(group, tmp_path):
    model = torch_ddp(nn.Linear(4, 2))
    tracer = start_tracer(tmp_path)
    try:
        tracer.add(model)
        compiled = torch.compile(model, backend="eager")  # it warns of what it cannot trace
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(compiled, optimizer)
    finally:
        stop_tracer()
    (trace,) = read_folder(tmp_path).values()
    assert len({one["forwards"][0]["outputs"] for one in trace.steps}) == 3


@pytest.mark.usefixtures("group")
def test_a_folder_that_cannot_be_made_is_an_error_of_the_wrapper(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPFUSE_TRACE", str(tmp_path / "file" / "below"))
    with pytest.raises(dpfuse.DPFuseError, match=r"DPFUSE_TRACE: rank 0 cannot write into the folder .*Name another"):
        dpfuse.DataParallel(nn.Linear(2, 2))


SETTINGS = json.dumps({"kind": "settings", "format": "dpfuse trace 1", "ranks": 1})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "holds no trace; expected files such as rank0.jsonl"),
        ("", "rank0.jsonl is empty"),
        ("nonsense\n", "line 1 is no line of a trace"),
        ('{"kind":"other"}\n', "line 1 is no line of a trace"),
        ('{"kind":"settings","format":"dpfuse trace 9"}\n', "has the format 'dpfuse trace 9', expected"),
        (SETTINGS.replace('"ranks": 1', '"ranks": 2') + "\n", "holds no trace of rank 1; the run had 2 ranks"),
    ],
)
def test_what_is_no_trace_is_an_error(text, error, tmp_path):
    if text is not None:
        (tmp_path / "rank0.jsonl").write_text(text)
    with pytest.raises(dpfuse.DPFuseError, match=error):
        read_folder(tmp_path)


def test_the_line_that_a_killed_process_has_begun_is_left_out(tmp_path):
    (tmp_path / "rank0.jsonl").write_text(f'{SETTINGS}\n{{"kind":"step","step":0}}\n{{"kind":"st')
    assert [line["step"] for line in read_folder(tmp_path)[0].steps] == [0]


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "rank0.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(dpfuse.DPFuseError, match=r"rank0\.jsonl cannot be read as a trace: .*expected"):
        read_folder(tmp_path)


def test_nothing_of_a_tracer_stays_when_it_is_stopped(group, tmp_path):
    plain = torch.autograd.backward
    net = nn.Linear(4, 2)
    model = dpfuse.DataParallel(net)
    hooks = [*model._forward_hooks, *model._forward_pre_hooks]
    tracer = start_tracer(tmp_path / "one")
    tracer.add(model)
    later = start_tracer(tmp_path / "two")  # in the place of the first
    later.add(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(model, optimizer)
    stop_tracer()
    stop_tracer()
    assert torch.autograd.backward is plain
    assert [*model._forward_hooks, *model._forward_pre_hooks] == hooks
    step(model, optimizer)
    assert [len(read_folder(tmp_path / name)[0].steps) for name in ("one", "two")] == [0, 1]


def test_a_backward_that_someone_else_has_wrapped_stays_theirs(group, tmp_path, monkeypatch):
    start_tracer(tmp_path)
    ours = torch.autograd.backward
    called = []

    def theirs(*args, **kwargs):
        called.append(args)
        ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    stop_tracer()
    assert torch.autograd.backward is theirs
    torch.ones(1, requires_grad=True).sum().backward()
    assert len(called) == 1
    assert (tmp_path / "rank0.jsonl").read_text().count("\n") == 1


def test_a_trace_keeps_no_wrapper_alive(traced):
    model = dpfuse.DataParallel(nn.Linear(4, 2))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_nothing_of_it_is_imported_where_the_variable_is_not_set():
    code = """
import sys, torch, torch.distributed as dist, dpfuse
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plain = torch.autograd.backward
dpfuse.DataParallel(torch.nn.Linear(2, 2))
print([name for name in sys.modules if name.partition("dpfuse.trace.")[1]], torch.autograd.backward is plain)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, timeout=patience(60)
    )
    assert done.stdout == "[] True\n", done.stderr


CHANGES_FOLDER = """
import os, sys
if "first" in sys.argv:
    os.chdir("elsewhere")
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dpfuse
if "first" not in sys.argv:
    os.chdir("elsewhere")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(DistributedDataParallel(torch.nn.Linear(2, 2))).__module__.partition(".")[0])
dpfuse.DataParallel(torch.nn.Linear(2, 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "wrapper"),
    [(["program.py"], "torch"), (["-m", "dpfuse", "run", "program.py", "first"], "dpfuse")],
    ids=["after the import", "before the import, under dpfuse run"],
)
def test_a_folder_is_that_of_the_start_where_the_program_changes_its_own(words, wrapper, tmp_path):
    (tmp_path / "program.py").write_text(CHANGES_FOLDER)
    (tmp_path / "elsewhere").mkdir()
    done = run(*words, folder=tmp_path, warm=False, DPFUSE_TRACE="here")
    assert (done.returncode, done.stdout) == (0, f"{wrapper}\n"), done.stderr
    assert read_folder(tmp_path / "here")[0].models
    assert list((tmp_path / "elsewhere").iterdir()) == []
