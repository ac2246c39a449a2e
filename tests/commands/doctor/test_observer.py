"""What the doctor does inside a process of the program: which wrappers it knows, when it ends, and what it hears."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpfuse.commands.doctor.messages import Messages
from dpfuse.commands.doctor.run_request import RunRequest
from dpfuse.commands.doctor.runs import OBSERVER, RunSetup, run_once
from dpfuse.commands.doctor.waiting_time import WaitingTime
from dpfuse.commands.run_command import Program
from dpfuse.rules import not_finite
from dpfuse.startup import startup_variables
from dpfuse.trace_file import read_folder
from tests.distributed.processes import clean_environment, run

PROGRAM = """
import importlib.util
importlib.util.find_spec("torch")  # as transformers does
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Derived(DistributedDataParallel):
    pass

{before}
net = torch.nn.Linear(2, 2)
model = {model}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    {inside}
print("behind the loop")
"""
NO_PASS = {"epochs": [], "set": False}
GROUP = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'


def observed(
    folder: Path, wrapper: str, model: str, before: str = GROUP, inside: str = "pass", warm: bool = True, steps: int = 5
) -> SimpleNamespace:
    """Run a program of one rank as the doctor does, for five steps."""
    variables = (
        startup_variables(OBSERVER, clean_environment()) | RunRequest(str(folder), wrapper, steps, 2).variables()
    )
    code = PROGRAM.format(model=model, before=before, inside=inside)
    done = run("-c", code, warm=warm, WARM_STARTUP="1", **variables)
    files = {path.name for path in folder.iterdir()}
    facts = json.loads((folder / "facts0.json").read_text()) if "facts0.json" in files else {}
    return SimpleNamespace(code=done.returncode, said=done.stdout, error=done.stderr, files=files, facts=facts)


@pytest.mark.parametrize("wrapper", ["dpfuse", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["DistributedDataParallel(net)", "Derived(net)", "net"])
def test_each_run_ends_after_its_steps_whatever_wraps_the_model(model, wrapper, tmp_path):
    found = observed(tmp_path, wrapper, model)
    assert (found.code, found.said) == (0, ""), found.error
    assert "done0" in found.files
    wrapped = model != "net"
    assert found.facts["replaceable"] == model.startswith("Distributed")
    assert found.facts["derived"] == ["Derived"] * model.startswith("Derived")
    assert found.facts["unwrapped"] == (0 if wrapped else 5)
    if wrapped:
        (trace,) = read_folder(tmp_path).values()
        assert len(trace.steps) == 5
        assert trace.models[0]["wrapper"] == (wrapper if model.startswith("Distributed") else "__main__")
    else:
        assert (tmp_path / "unwrapped0").read_text() == "....."


@pytest.mark.parametrize(
    ("model", "wrapper", "made", "numeric"),
    [
        ("dpfuse.DataParallel(net, None, 5, find_unused_parameters=True)", "torch buckets", "torch", []),
        ("dpfuse.DataParallel(net, gradient_scale=0.5)", "dpfuse", "dpfuse", ["gradient_scale"]),
        ("dpfuse.DistributedDataParallel(net, wire_dtype=torch.bfloat16)", "torch", "torch", ["wire_dtype"]),
        ("Own(net)", "torch", "__main__", []),
        ("dpfuse.patch() and DistributedDataParallel(net)", "torch", "torch", []),
    ],
)
def test_torchs_class_takes_the_place_of_ours(model, wrapper, made, numeric, tmp_path):
    own = "class Own(dpfuse.DataParallel):\n    pass"
    found = observed(tmp_path, wrapper, model, f"import dpfuse\n{GROUP}\n{own}")
    assert (found.code, found.said) == (0, ""), found.error
    assert (found.facts["own"], found.facts["numeric"]) == ("patch" not in model, numeric)
    assert (found.facts["replaceable"], found.facts["derived"]) == ((0, ["Own"]) if made == "__main__" else (1, []))
    (trace,) = read_folder(tmp_path).values()
    assert (trace.models[0]["wrapper"], len(trace.steps)) == (made, 5)


@pytest.mark.slow
def test_a_look_for_torch_before_its_import_changes_nothing(tmp_path):
    found = observed(tmp_path, "dpfuse", "DistributedDataParallel(net)", warm=False)
    assert (found.code, found.said, found.facts["replaceable"]) == (0, "", 1), found.error
    assert read_folder(tmp_path)[0].models[0]["wrapper"] == "dpfuse"


def test_a_size_of_buckets_by_its_place_is_replaced_in_the_run_with_other_buckets(tmp_path):
    found = observed(tmp_path, "torch buckets", "DistributedDataParallel(net, None, None, 0, True, True, None, 25)")
    assert (found.code, found.said) == (0, ""), found.error
    assert len(read_folder(tmp_path)[0].steps) == 5


def test_a_program_without_a_process_group_ends_too(tmp_path):
    found = observed(tmp_path, "torch", "net", before="")
    assert (found.code, found.said, found.facts["unwrapped"]) == (0, "", 5), found.error


def test_a_rank_that_has_left_its_group_before_the_last_step_ends(tmp_path):
    leave = "step == 3 and dist.destroy_process_group()"
    found = observed(tmp_path, "torch", "DistributedDataParallel(net)", inside=leave)
    assert (found.code, found.said) == (0, ""), found.error


def test_files_that_are_read_are_told_without_links(tmp_path):
    (tmp_path / "devel").mkdir()
    (tmp_path / "devel" / "last.pt").write_text("")
    (tmp_path / "runs").symlink_to(tmp_path / "devel")
    (tmp_path / "devel" / "own").symlink_to(tmp_path / "devel" / "mine")
    paths = [str(tmp_path / name) for name in ("runs/last.pt", "runs/own", "devel/mine")]
    reading = f"open({paths[0]!r}).close(); open({paths[1]!r}, 'w').close(); open({paths[2]!r}).close()"
    (tmp_path / "facts").mkdir()
    found = observed(tmp_path / "facts", "torch", "net", before=reading)
    assert str(tmp_path / "devel" / "last.pt") in found.facts["read"], found.error
    assert not {str(tmp_path / "devel" / "mine"), *paths} & {*found.facts["read"]}


SAMPLED = """
from torch.utils.data import DataLoader, DistributedSampler

class Own(DistributedSampler):
    def __iter__(self):
        return iter([*super().__iter__()])

    def set_epoch(self, epoch):
        self.epoch = epoch + 1

def sampler(kind=DistributedSampler, **options):
    return kind(range(8), num_replicas=2, rank=0, **options)

def train(sampler, validation=None, workers=0, epochs=4):
    net = torch.nn.Linear(1, 1)
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    made = dict(batch_size=2, num_workers=workers, persistent_workers=bool(workers))
    loader = DataLoader(sampler.dataset, sampler=sampler, **made)
    for epoch in range(epochs):
        {epoch}
        for x in loader:
            model(x[:, None].float()).sum().backward()
            optimizer.step()
            for other in DataLoader(range(8), sampler=validation) if validation is not None else ():
                pass

def train_without_a_loader(validation):
    net = torch.nn.Linear(1, 1)
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for step in range(4):
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
        for other in DataLoader(range(8), sampler=validation):
            pass
"""


@pytest.mark.parametrize(
    ("training", "epoch", "found"),
    [
        ("train(sampler())", "pass", [{"epochs": [0, 0, 0, 0], "set": False}]),
        pytest.param(
            "train(sampler(), workers=1)", "pass", [{"epochs": [0, 0, 0, 0], "set": False}], marks=pytest.mark.slow
        ),
        ("train(sampler(Own))", "pass", [{"epochs": [0, 0, 0, 0], "set": False}]),
        ("train(sampler(), sampler())", "sampler.set_epoch(7)", [{"epochs": [7] * 4, "set": True}, NO_PASS]),
        ("train_without_a_loader(sampler())", "pass", [NO_PASS]),
        ("train(sampler(Own))", "sampler.set_epoch(epoch)", [{"epochs": [1, 2, 3, 4], "set": False}]),
        ("train(sampler(shuffle=False))", "pass", []),
    ],
    ids=[
        "never set",
        "by a worker",
        "an own class",
        "beside a validation",
        "of a validation alone",
        "set by its own method",
        "in order",
    ],
)
def test_passes_of_the_training_over_samplers_are_counted(training, epoch, found, tmp_path):
    before = f"{GROUP}\n{SAMPLED.format(epoch=epoch)}\n{training}"
    got = observed(tmp_path, "torch", "net", before=before, steps=8)
    assert got.facts["samplers"] == found, got.error


SCALED = """
def train(is_bad, **options):
    net = torch.nn.Linear(2, 2)
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(40):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() * (torch.inf if is_bad(step) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("training", "made", "steps"),
    [
        ("train(lambda step: True)", [False] * 5, 0),
        ("train(lambda step: step == 1)", [True, False, True, True, True, True], 5),
        ("train(lambda step: step > 1, fused=True)", [True, True, False, False, False], 5),  # a step that does nothing
    ],
    ids=["all are skipped", "one is skipped", "by a fused optimizer"],
)
def test_a_run_ends_whatever_a_scaler_skips(training, made, steps, tmp_path):
    found = observed(tmp_path, "torch", "net", before=f"{GROUP}\n{SCALED}\n{training}")
    assert (found.code, found.said) == (0, ""), found.error
    assert found.facts["scaled"] == [{"optimizer": "SGD", "made": made}]
    traces = read_folder(tmp_path)
    assert len(traces[0].steps) == steps
    assert not_finite.find(traces) is None


SPAWNS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    while True:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    open(sys.argv[1]).close()
    mp.spawn(work, nprocs=1)
    print("behind the ranks", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_starts_its_ranks_runs_no_code_behind_them(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "saved").write_text("")
    program = Program(str(tmp_path / "spawns.py"), (str(tmp_path / "saved"),))
    setup = RunSetup(program, 1, True, 5, 2, 60.0, tmp_path)
    found = run_once(setup, 1, "torch", lambda text: None)
    assert (found.code, found.unwrapped, found.log.read_text()) == (0, 5, "")
    assert str(tmp_path / "saved") in found.read()  # by the process that has started the rank


def test_warnings_keep_their_places_and_those_of_dpfuse_are_noted(monkeypatch, recwarn):
    for owner, name in ((warnings, "warn"), (sys, "excepthook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    log = logging.getLogger("dpfuse.loop")
    monkeypatch.setattr(log, "handlers", [*log.handlers])
    monkeypatch.setattr(log, "level", log.level)
    messages = Messages(lambda: None)
    ours = {"__name__": "dpfuse.some", "warnings": warnings}
    exec("def say(): warnings.warn('ours', stacklevel=2)", ours)
    warnings.warn("of the program", stacklevel=1)
    ours["say"]()
    assert [(str(one.message), one.filename) for one in recwarn] == [("of the program", __file__), ("ours", __file__)]
    assert list(messages.noted) == [("UserWarning", "ours")]


def test_the_time_before_the_first_step_gives_no_patience(monkeypatch):
    times = iter([0.0, 100.0, 101.0, 103.0, 127.9, 128.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    patience = WaitingTime()
    for _ in range(3):
        patience.step()
    assert patience.seconds == 5 + 10 * 2
    assert [patience.is_over, patience.is_over] == [False, True]
