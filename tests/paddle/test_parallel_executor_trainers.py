"""ParallelExecutor in several processes: two trainers of two devices are four devices."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import Regression, batch, momentum, program_of

STEPS = 4


class Net(nn.Module):
    """With batch norm and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.net = Regression()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(self.norm(self.base(x)), t)["loss"]}


def make(seed: int, devices: int, **options: Any) -> tuple[static.Program, static.ParallelExecutor]:
    os.environ["CPU_NUM"] = str(devices)
    torch.manual_seed(seed)
    program = program_of(Net().double(), t=[None, None])
    program.minimize("loss", momentum)
    return program, static.ParallelExecutor(False, "loss", program, scope=static.Scope(), **options)


def parts_of(step: int) -> list[dict[str, torch.Tensor]]:
    """What four devices are fed, of different lengths."""
    return [{k: v.double() for k, v in batch(10 * step + part, rows=2 + part).items()} for part in range(4)]


def parameters(program: static.Program, exe: static.ParallelExecutor) -> list[np.ndarray]:
    names = [name for name, one in program.variables.items() if isinstance(one, nn.Parameter)]
    test = static.ParallelExecutor(False, main_program=program.clone(for_test=True), share_vars_from=exe)
    found = []
    for devices in test.run(names, parts_of(0)[: exe.device_count], return_merged=False):
        assert all(np.array_equal(device, devices[0]) for device in devices)
        found.append(devices[0])
    return found


def trainer(rank: int, size: int) -> list[np.ndarray]:
    program, exe = make(rank, 2, num_trainers=size, trainer_id=rank)
    for step in range(STEPS):
        exe.run(["loss"], parts_of(step)[2 * rank : 2 * rank + 2])
    return parameters(program, exe)


def test_two_trainers_of_two_devices_are_four_devices(ranks, monkeypatch):
    first, second = ranks(trainer)
    monkeypatch.setenv("CPU_NUM", "4")
    program, exe = make(0, 4)
    for step in range(STEPS):
        exe.run([], parts_of(step))
    for one, other, want in zip(first, second, parameters(program, exe), strict=True):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, want, rtol=0, atol=1e-12)


def starts_like_trainer_0(rank: int, size: int) -> list[np.ndarray]:
    program, exe = make(rank, 2, num_trainers=size, trainer_id=rank)
    return parameters(program, exe)


def test_variables_are_those_of_trainer_0(ranks, monkeypatch):
    first, second = ranks(starts_like_trainer_0)
    monkeypatch.setenv("CPU_NUM", "2")
    for one, other, want in zip(first, second, parameters(*make(0, 2)), strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(one, want)


def fails_on_trainer_1(rank: int, size: int, kind: str) -> tuple[str, bool]:
    program, exe = make(rank, 2, num_trainers=size, trainer_id=rank)
    exe.run([], parts_of(0)[:2])
    before = parameters(program, exe)
    parts: Any = parts_of(1)[:2]
    if rank == 1 and kind == "forward":
        parts[1]["t"] = parts[1]["t"][:, :1].repeat(1, 5)
    if rank == 1 and kind == "feed":
        parts = parts[:1]
    try:
        exe.run([], parts)
    except (DPFuseError, ValueError) as error:
        text = str(error)
    same = all(map(np.array_equal, before, parameters(program, exe)))
    exe.run([], parts_of(2)[:2])
    return text, same


def test_when_one_trainer_fails_all_raise_and_none_takes_a_step(ranks):
    (other, same), (failed, same_too) = ranks(fails_on_trainer_1, "forward")
    assert "device 1 (cpu) failed to compute" in failed
    assert "failed on rank 1" in other
    assert failed in other
    assert same
    assert same_too
    (other, same), (failed, same_too) = ranks(fails_on_trainer_1, "feed")
    assert "feed is a list of 1" in failed
    assert failed in other
    assert same
    assert same_too


def wrong_fetch_on_trainer_1(rank: int, size: int) -> list[np.ndarray]:
    program, exe = make(rank, 2, num_trainers=size, trainer_id=rank)
    for step in range(2):
        if rank == 1 and step == 1:
            with pytest.raises(DPFuseError, match="'x@GRAD' cannot be fetched"):
                exe.run(["x@GRAD"], parts_of(step)[2:])
        else:
            exe.run([], parts_of(step)[2 * rank : 2 * rank + 2])
    return parameters(program, exe)


def test_a_value_that_cannot_be_fetched_does_not_part_the_trainers(ranks):
    for one, other in zip(*ranks(wrong_fetch_on_trainer_1), strict=True):
        assert np.array_equal(one, other)


def trainers_that_do_not_fit(rank: int, size: int, kind: str) -> str:
    options: dict[str, Any] = {"num_trainers": size, "trainer_id": rank}
    devices = 2
    match kind:
        case "devices":
            devices = 2 + rank
        case "trainer_id":
            options["trainer_id"] = 1 - rank
        case "num_trainers":
            options["num_trainers"] = 3
    try:
        if kind == "program" and rank == 1:
            os.environ["CPU_NUM"] = "2"
            program = program_of(Regression())
            static.ParallelExecutor(False, "loss", program, scope=static.Scope(), **options)
        else:
            make(rank, devices, **options)
    except (DPFuseError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_trainers_that_do_not_fit_together_are_told(ranks):
    first, second = ranks(trainers_that_do_not_fit, "devices")
    assert first == second
    assert "DPFuseError" in first
    assert "devices per trainer" in first
    first, second = ranks(trainers_that_do_not_fit, "program")
    assert first == second
    assert "differs between ranks" in first
    first, second = ranks(trainers_that_do_not_fit, "trainer_id")
    assert (
        "ValueError: got num_trainers=2 and trainer_id=1 on rank 0 of 2; expected num_trainers=2 and trainer_id=0"
        in first
    )
    assert "trainer_id=0 on rank 1" in second
    first, second = ranks(trainers_that_do_not_fit, "num_trainers")
    assert "got num_trainers=3" in first
    assert "rank 1 of 2" in second
