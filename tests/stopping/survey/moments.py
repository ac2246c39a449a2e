"""When the signal of a trial comes: a program arms the moment, and the rank of the trial sends when it is there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.stopping.survey.trials import Trial

__all__ = ["MICRO_BATCHES", "arm"]

MICRO_BATCHES = 2  # of a step, on each rank
APART = 0.05  # seconds between two signals
LOOK = 0.5  # seconds in which the launcher sends it on; otherwise a training of some steps could end before


def arm(trial: Trial, net: nn.Module, folder: Path) -> None:
    """Let the signal come at the moment of the trial.

    Args:
        trial: whose signal it is.
        net: of the program, without a wrapper.
        folder: in which the ranks tell their processes.
    """
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == trial.source:
        MOMENTS[trial.moment](trial, net, _once(lambda: _send(trial, folder)))


def _once(call: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def first() -> None:
        if not done:
            done.append(True)
            call()

    return first


def _send(trial: Trial, folder: Path) -> None:
    number = getattr(signal, trial.number)
    if trial.target in ("launcher", "all"):
        os.kill(os.getppid(), number)
    if trial.target == "all":
        for file in sorted(folder.glob("pid-*")):
            os.kill(int(file.read_text()), number)
    if trial.target.startswith("one rank"):
        os.kill(os.getpid(), number)
    if trial.target.endswith("twice"):
        time.sleep(APART)
        os.kill(os.getpid(), number)
    time.sleep(LOOK)


def _in_forward(trial: Trial, net: nn.Module, send: Callable[[], None], *, micro_batch: int, backward: bool) -> None:
    """Send in the forward of this micro-batch of the step, or in its backward."""
    forwards = 0

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal forwards
        if not module.training:
            return
        if forwards == trial.step * MICRO_BATCHES + micro_batch:
            if backward:
                output.register_hook(lambda grad: send())
            else:
                send()
        forwards += 1

    _layer(net).register_forward_hook(after_forward)


def _in_evaluation(trial: Trial, net: nn.Module, send: Callable[[], None]) -> None:
    _layer(net).register_forward_hook(lambda module, *_: None if module.training else send())


def _in_step(trial: Trial, net: nn.Module, send: Callable[[], None]) -> None:
    steps = 0

    def before_step(*_: Any) -> None:
        nonlocal steps
        if steps == trial.step:
            send()
        steps += 1

    register_optimizer_step_pre_hook(before_step)


def _while_saving(trial: Trial, net: nn.Module, send: Callable[[], None]) -> None:
    net.register_state_dict_pre_hook(lambda *_: send())


def _layer(net: nn.Module) -> nn.Module:
    return next(each for each in net.modules() if isinstance(each, nn.Linear))


MOMENTS: dict[str, Callable[[Trial, nn.Module, Callable[[], None]], None]] = {
    "forward": lambda *told: _in_forward(*told, micro_batch=0, backward=False),
    "window": lambda *told: _in_forward(*told, micro_batch=0, backward=True),
    "backward": lambda *told: _in_forward(*told, micro_batch=1, backward=True),
    "step": _in_step,
    "evaluation": _in_evaluation,
    "saving": _while_saving,
    "start": lambda trial, net, send: send(),
}
