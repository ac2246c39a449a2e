"""One run of the user's program by the doctor: starts it, watches its progress, and reads what it has left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfuse.commands.doctor.observer import OVER, UNWRAPPED, Order, all_done
from dpfuse.commands.run_command import Program
from dpfuse.errors import DPFuseError
from dpfuse.job.startup import startup_variables
from dpfuse.trace.attachment import VARIABLE
from dpfuse.trace.trace_file import RankTrace, read_folder

__all__ = ["TITLES", "Plan", "Run", "run_once"]

OBSERVER = "dpfuse.commands.doctor.observer"
TITLES = {
    "torch": "torch DDP",
    "dpfuse": "dpfuse",
    "torch buckets": "torch DDP, other buckets",
    "tuned": "dpfuse, tuned",
}
# Trackers that send something unless they are told not to, and what keeps them on this machine.
OFFLINE = {
    "WANDB_MODE": "offline",
    "COMET_START_MODE": "offline",
    "COMET_OFFLINE_DIRECTORY": "{folder}/comet",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "file://{folder}/mlflow",
    "WANDB_DIR": "{folder}",
    "AIM_REPO": "{folder}",
}
KEPT = {"WANDB_MODE": ("disabled", "dryrun"), "NEPTUNE_MODE": ("debug",)}  # what is safe already
TUNING = 30  # steps that the tuner gets, more than it needs
RANK_0 = "rank0.jsonl"  # its trace
LOOK = 0.2  # seconds between two looks at the progress
GRACE = 0.5  # seconds for processes that are not ranks, to write what they have read
SAY = 5.0  # seconds between two messages


@dataclass(frozen=True)
class Plan:
    """What is the same in all runs.

    Args:
        program: of the user.
        ranks: to start.
        own_ranks: whether the program starts them itself.
        steps: after which a run ends.
        deep: steps in the beginning, which are hashed in full and not timed.
        patience: seconds without a step, after which a run is ended.
        folder: of the doctor's own files.
    """

    program: Program
    ranks: int
    own_ranks: bool
    steps: int
    deep: int
    patience: float
    folder: Path


@dataclass
class Run:
    """What came of one run.

    Args:
        number: from 1.
        wrapper: a key of `TITLES`.
        code: the exit code; None if it was ended because it made no step for too long.
        seconds: from its start to its end.
        log: what the ranks have printed.
        traces: by rank; empty if there are none.
        facts: of each process, as the observer has written them.
    """

    number: int
    wrapper: str
    code: int | None
    seconds: float
    log: Path
    traces: dict[int, RankTrace] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name in reports."""
        return f"run {self.number}, {TITLES[self.wrapper]}"

    @property
    def steps(self) -> int:
        """How many lines every rank has written."""
        return min((len(trace.steps) for trace in self.traces.values()), default=0)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, or not at all."""
        return self.code != 0

    @property
    def derived(self) -> list[str]:
        """The classes of wrappers that derive from torch's, which dpfuse does not replace."""
        return sorted({name for facts in self.facts.values() for name in facts["derived"]})

    @property
    def replaceable(self) -> bool:
        """Whether a rank has made a wrapper that dpfuse replaces."""
        return any(facts["replaceable"] for facts in self.facts.values())

    @property
    def unwrapped(self) -> int:
        """How many steps an optimizer has made on ranks without a wrapper."""
        return max((facts["unwrapped"] for facts in self.facts.values()), default=0)

    def reason(self) -> str:
        """Return why it has failed, in one line."""
        if self.code is None:
            return "it made no step for too long, and was ended"
        errors = [note for facts in self.facts.values() for note in facts["findings"] if note["what"] == "error"]
        # A rank that failed closes its connections, and the others then fail, too.
        errors.sort(key=lambda note: "onnection" in note["text"])
        if errors:
            first = errors[0]["text"].strip().partition("\n")[0]
            return f"{errors[0]['kind']}: {first}" if first else errors[0]["kind"]
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit code {self.code}{f': {lines[-1]}' if lines else ''}"

    def read(self) -> list[str]:
        """Return the files that it has read without having written them."""
        return sorted({path for facts in self.facts.values() for path in facts["read"]})


def run_once(plan: Plan, number: int, wrapper: str, say: Callable[[str], None]) -> Run:
    """Run the program once.

    Args:
        plan: of the doctor.
        number: of the run, from 1.
        wrapper: a key of `TITLES`.
        say: gets a line now and then.
    """
    folder = plan.folder / f"run{number}"
    folder.mkdir()
    steps = min(plan.steps, plan.deep + TUNING) if wrapper == "tuned" else plan.steps
    order = Order(str(folder), wrapper, steps, plan.deep, plan.own_ranks)
    environ = {**os.environ, **startup_variables(OBSERVER, os.environ), **order.variables()}
    environ |= offline(os.environ, folder)
    environ.pop(VARIABLE, None)  # the doctor traces by itself
    if plan.own_ranks:
        words = plan.program.words()
    else:
        words = [sys.executable, "-m", "dpfuse.launch", "--nproc_per_node", str(plan.ranks)]
        words += plan.program.words_for_launcher()
    run = Run(number, wrapper, None, 0.0, folder / "log.txt")
    began = time.monotonic()
    with open(run.log, "wb") as log:
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            run.code = _watched(process, folder, plan, run.title, steps, say)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            (folder / OVER).touch()
    run.seconds = time.monotonic() - began
    for path in sorted(folder.glob("facts*.json")):
        run.facts[path.stem.removeprefix("facts")] = json.loads(path.read_text(encoding="utf-8"))
    try:
        run.traces = read_folder(folder)
    except DPFuseError:
        run.traces = {}  # no model was wrapped, or a rank has ended before
    return run


def offline(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables that keep trackers of experiments offline.

    Example:
        >>> from pathlib import Path
        >>> from dpfuse.commands.doctor.runs import offline
        >>> offline({}, Path("/x"))["WANDB_MODE"], "WANDB_MODE" in offline({"WANDB_MODE": "disabled"}, Path("/x"))
        ('offline', False)
    """
    return {
        name: value.format(folder=folder)
        for name, value in OFFLINE.items()
        if environ.get(name) not in KEPT.get(name, ())
    }


def _watched(
    process: subprocess.Popen[bytes], folder: Path, plan: Plan, title: str, steps: int, say: Callable[[str], None]
) -> int | None:
    """Wait for the end of a run; return its exit code, or None if it makes no progress."""
    before, moved, said = (0, 0), time.monotonic(), time.monotonic()
    while True:
        try:
            return process.wait(LOOK)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if plan.own_ranks and all_done(folder):
            time.sleep(GRACE)
            os.killpg(process.pid, signal.SIGKILL)  # also a shell, which has code behind the ranks
            process.wait()
            return 0
        progress = _progress(folder)
        if progress != before:
            before, moved = progress, now
        elif now - moved > plan.patience:
            return None
        if now - said > SAY:
            said = now
            done = max(progress[1], _lines(folder / RANK_0))
            say(f"{title}: {f'step {done} of {steps}' if done else 'starting'}")


def _progress(folder: Path) -> tuple[int, int]:
    """Return what grows with the steps: the size of rank 0's trace, and the steps of the rank without one."""
    trace, counted = folder / RANK_0, [path.stat().st_size for path in folder.glob(f"{UNWRAPPED}*")]
    return trace.stat().st_size if trace.exists() else 0, max(counted, default=0)


def _lines(trace: Path) -> int:
    return trace.read_bytes().count(b'{"kind":"step"') if trace.exists() else 0
