"""What acts inside the processes of a program that the doctor runs. It makes the parts, and writes what they found.

It is imported after `import torch`, which may be one of dpfuse's own imports. So it takes no name from `dpfuse`.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from dpfuse.commands.doctor.call_notes import CallNotes
from dpfuse.commands.doctor.measurements import Measurements
from dpfuse.commands.doctor.messages import Messages
from dpfuse.commands.doctor.process_end import ProcessEnd
from dpfuse.commands.doctor.read_files import ReadFiles
from dpfuse.commands.doctor.run_request import REQUEST, RunRequest
from dpfuse.commands.doctor.sampler_passes import SamplerPasses
from dpfuse.commands.doctor.scaler_steps import ScalerSteps
from dpfuse.commands.doctor.untraced_steps import UntracedSteps
from dpfuse.commands.doctor.wrapper_constructors import WrapperConstructors
from dpfuse.engine.optimizer_step_hook import call_after_steps
from dpfuse.trace.process_trace import start_tracer
from dpfuse.trace.tracer import Tracer

__all__ = ["start"]

SEED = 20261126

_observer: _Observer | None = None


def start() -> None:
    """Act as the variable says. Called once torch is imported."""
    global _observer
    if _observer is None:
        _observer = _Observer(RunRequest(**json.loads(os.environ[REQUEST])))


class _Observer:
    """Acts in one process. What it learns it writes into the folder, at the end or when an exception ends the process.

    Args:
        request: of the doctor.
    """

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._tracer: Tracer | None = None
        self._end = ProcessEnd(request, self._write_facts)
        self._untraced = UntracedSteps(Path(request.folder), self._end)
        self._measurements = Measurements(request.wrapper)
        _seed()
        # Each of these replaces functions. A later one calls what an earlier one has put there.
        self._messages = Messages(self._write_facts)
        self._files = ReadFiles()
        self._passes = SamplerPasses(lambda: self._tracer)
        self._scaled = ScalerSteps(self._untraced)
        self._calls = CallNotes(lambda: self._tracer)
        self._wrappers = WrapperConstructors(request.wrapper, self._made)
        call_after_steps(self)
        self._end.follow_the_ranks()
        atexit.register(self._write_facts)

    def _made(self, wrapper: Any) -> None:
        self._measurements.add(wrapper)
        if self._tracer is None:
            self._end.trains()
            self._tracer = start_tracer(
                Path(self._request.folder),
                self._request.deep,
                self._after_line,
                sketch=self._end.rank.size > 2,
                buffers=self._request.wrapper == "dpfuse",  # torch's class leaves them apart until the next forward
                finite=True,
            )
        self._tracer.add(wrapper)

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`: count where no model is wrapped, and so no tracer counts."""
        self._scaled.after_step(optimizer)
        if self._tracer is None:
            self._untraced.step(optimizer)

    def _after_line(self, steps: int) -> None:
        self._end.patience.step()
        self._passes.step()
        if steps == self._request.deep:
            self._measurements.begin()
        self._end.after(steps)

    def _write_facts(self) -> None:
        rank, tracer = self._end.rank, self._tracer
        if os.getpid() != rank.process:
            return  # a fork, such as a worker of a loader
        facts = {
            "communication": self._measurements.communication(),
            "tunings": self._measurements.tunings(),
            "findings": list(self._messages.noted.values()),
            "samplers": self._passes.found(),
            "read": list(self._files.paths),
            "unused": {} if tracer is None else tracer.unused(),
            "behind": 0 if tracer is None else tracer.since_step,
            "lines": {} if tracer is None else tracer.phases.lines,
            "replaceable": self._wrappers.replaceable,
            "own": self._wrappers.own,
            "evaluated": {} if tracer is None else tracer.evaluated,
            "numeric": list(self._wrappers.numeric),
            "derived": list(self._wrappers.derived),
            "scaled": list(self._scaled.scaled.values()),
            "unwrapped": max(self._untraced.unwrapped.values(), default=0),
        }
        folder = Path(self._request.folder)
        draft = folder / f"draft{rank.name}"  # the doctor may end this process meanwhile
        draft.write_text(json.dumps(facts), encoding="utf-8")
        draft.replace(folder / f"facts{rank.name}.json")


def _seed() -> None:
    """Seed all generators, so that a program that seeds none can be compared with itself."""
    name = multiprocessing.current_process().name
    number = os.environ.get("RANK") or "".join(filter(str.isdigit, name)) or "0"
    seed = SEED + int(number)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
