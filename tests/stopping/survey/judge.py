"""Runs one trial, and says what is wrong with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dpfuse.checkpoint.folder import read_whole
from tests.distributed.processes import clean_environment, python
from tests.patience import patience
from tests.stopping.survey.network import EPOCHS, LENGTH
from tests.stopping.survey.notes import read_notes
from tests.stopping.survey.trials import Trial, words_of

__all__ = ["faults_of"]

PROGRAMS = {
    "plain": "program",
    "sharded": "program",
    "lightning": "lightning_program",
    "trainer": "trainer_program",
}
REQUEUE = 85  # the exit code of a job that has stopped
LIMIT = 120.0  # seconds of one job


def faults_of(trial: Trial) -> list[str]:
    """Run a trial; return what is wrong, a sentence each."""
    with TemporaryDirectory(prefix="stopping-") as name:
        folder = Path(name)
        code, told = _job(trial, folder, "first", trial.ranks, with_signal=True)
        faults = [] if code == REQUEUE else [f"the job ended with {code}, expected {REQUEUE}: {told[-600:]}"]
        first = read_notes(folder, "first")
        faults += _faults_of_stop(trial, folder, first)
        if faults:
            return faults
        code, told = _job(trial, folder, "rest", trial.rest, with_signal=False)
        if code:
            return [f"the rest ended with {code}: {told[-600:]}"]
        rest = read_notes(folder, "rest")
        return [*_faults_of_samples(first, rest), *_faults_of_bits(trial, rest)]


def _job(trial: Trial, folder: Path, part: str, ranks: int, *, with_signal: bool) -> tuple[int | str, str]:
    """Run a job; return its exit code, or "hang", and what it has printed."""
    words = ["--nproc_per_node", str(ranks), "--requeue_exit", str(REQUEUE)]
    program = ["-m", f"tests.stopping.survey.{PROGRAMS[trial.kind]}"]
    # A job that gets no signal needs no processes that Python itself has started.
    warm = {} if with_signal else {"PYTHON_EXEC": python(warm=True)}
    job = subprocess.Popen(
        [
            python(warm=not with_signal),
            "-m",
            "dpfuse.launch",
            *words,
            *program,
            *words_of(folder, part, trial, with_signal=with_signal),
        ],
        env=clean_environment(**warm),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = job.communicate(timeout=patience(LIMIT))
    except subprocess.TimeoutExpired:
        for file in folder.glob("pid-*"):
            _kill(int(file.read_text()))
        _kill(job.pid)
        return "hang", job.communicate()[0]
    return job.returncode, printed


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _faults_of_stop(trial: Trial, folder: Path, notes: list[list[dict[str, Any]]]) -> list[str]:
    ends = [[line for line in rank if "stopped" in line] for rank in notes]
    if [len(each) for each in ends] != [1] * trial.ranks:
        return [f"the ranks have stopped {[len(each) for each in ends]} times, expected once each"]
    told = {(each[0]["stopped"], each[0]["reason"]) for each in ends}
    if len(told) > 1:
        return [f"the ranks have stopped in different steps, or for different reasons: {sorted(told)}"]
    step, reason = told.pop()
    faults = [] if f"got {trial.number}" in reason else [f"the reason is {reason!r}, expected {trial.number}"]
    saved = [[line["saved"] for line in rank if "saved" in line] for rank in notes]
    if any(each != sorted(set(each)) or each[-1:] != [step] for each in saved):
        faults.append(f"the ranks have saved in steps {saved}, expected each once and step {step} last")
    newest = _newest(trial.kind, folder / "checkpoints")
    return faults if newest == step else [*faults, f"the newest checkpoint is of step {newest}, expected {step}"]


def _newest(kind: str, folder: Path) -> int:
    """The step of the newest checkpoint, which is read whole."""
    if kind == "lightning":
        return int(torch.load(folder / "stopped.ckpt", weights_only=False)["global_step"])
    if kind == "trainer":
        newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        torch.load(newest / "optimizer.pt", weights_only=True)
        return int(json.loads((newest / "trainer_state.json").read_text())["global_step"])
    return int(read_whole(max(folder.glob("step-*.pt")))["step"])


def _faults_of_samples(*jobs: list[list[dict[str, Any]]]) -> list[str]:
    given = Counter(
        (line["epoch"], sample)
        for notes in jobs
        for rank in notes
        for line in rank
        if "samples" in line
        for sample in line["samples"]
    )
    wrong = {pair: times for pair, times in given.items() if times != 1}
    lost = {(epoch, sample) for epoch in range(EPOCHS) for sample in range(LENGTH)} - given.keys()
    return [f"samples came several times: {wrong}"] * bool(wrong) + [f"samples were lost: {lost}"] * bool(lost)


def _faults_of_bits(trial: Trial, rest: list[list[dict[str, Any]]]) -> list[str]:
    weights = {line["weights"] for rank in rest for line in rank if "weights" in line}
    if len(weights) != 1:
        return [f"the ranks have ended with different weights: {sorted(weights)}"]
    if trial.rest == trial.ranks and weights != {_undisturbed(trial.kind, trial.ranks)}:
        return ["the weights are not those of a training without a signal"]
    return []


@cache
def _undisturbed(kind: str, ranks: int) -> str:
    """The weights of a training that gets no signal; workers change nothing."""
    trial = replace(_ANY, kind=kind, ranks=ranks)
    with TemporaryDirectory(prefix="stopping-") as name:
        code, told = _job(trial, Path(name), "first", ranks, with_signal=False)
        assert code == 0, told
        return str(read_notes(Path(name), "first")[0][-1]["weights"])


_ANY = Trial("plain", 2, 2, 0, "SIGUSR1", "one rank", "forward", 0, 0)
