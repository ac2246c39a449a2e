"""One job that gets SIGTERM, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed.processes import clean_environment, family

__all__ = ["PATIENCE", "TARGETS", "WAYS", "Outcome", "collectives_of", "judge", "play"]

PROGRAM = Path(__file__).parent / "program.py"
RANKS = 2
WAYS = ("flag", "all-reduce", "lightning", "accelerate", "dpfuse")
TARGETS = ("launcher", "rank 0", "rank 1")
STEPS = 25  # of every rank, before the signal
PATIENCE = 60.0  # seconds after the signal: a job that has not ended then hangs
START = 120.0  # seconds in which every rank makes its first steps


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        how: "same step" if each rank has left its loop after the same step; "hang" if the job has not ended in time;
            "error" if a rank has raised; "killed" if one has neither left its loop nor raised; else "other steps".
        saved: whether there is a whole checkpoint of the last step.
        code: the exit code; None after a hang.
        seconds: from the signal to the end of the job.
        told: what each rank has raised, if it has.
    """

    how: str
    saved: bool
    code: int | None
    seconds: float
    told: tuple[str, ...] = ()


def play(way: str, target: str, folder: Path) -> Outcome:
    """Start a job, send SIGTERM to its launcher or to one of its ranks, and wait for its end."""
    job = start(way, folder)
    try:
        wait_for(lambda: min(map(steps_of, notes_in(folder))) >= STEPS, job, folder)
        pids = [fact(told, "pid") for told in notes_in(folder)]
        sent = time.monotonic()
        os.kill(job.pid if target == "launcher" else pids[TARGETS.index(target) - 1], signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(PATIENCE)
        return judge(notes_in(folder), job.returncode, time.monotonic() - sent, step_saved_in(folder))
    finally:
        end(job, folder)


def collectives_of(way: str, folder: Path) -> tuple[float, float]:
    """Return the collectives of a step of rank 0: where it never asks whether to stop, and where it does."""
    quiet, asking = (_collectives(way, folder / name, words) for name, words in (("quiet", ["quiet"]), ("asking", [])))
    return quiet, asking


def _collectives(way: str, folder: Path, words: Sequence[str]) -> float:
    folder.mkdir()
    job = start(way, folder, *words)
    try:
        wait_for(lambda: fact(notes_in(folder)[0], "collectives") is not None, job, folder)
        return float(fact(notes_in(folder)[0], "collectives"))
    finally:
        end(job, folder)


def judge(notes: Sequence[Sequence[Mapping[str, Any]]], code: int | None, seconds: float, saved: int | None) -> Outcome:
    """Say what came of a job.

    Args:
        notes: the lines of each rank.
        code: the exit code of the job; None if it has not ended in time.
        seconds: since the signal.
        saved: the step of the whole checkpoint, if there is one.
    """
    steps = [steps_of(told) for told in notes]
    left = [fact(told, "left") is not None for told in notes]
    raised = tuple(filter(None, (fact(told, "raised") for told in notes)))
    if code is None:
        how = "hang"
    elif raised:
        how = "error"
    elif not all(left):
        how = "killed"
    else:
        how = "same step" if len({*steps}) == 1 else "other steps"
    return Outcome(how, saved == max(steps), code, round(seconds, 1), raised)


def start(way: str, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a job of two ranks."""
    launcher = "dpfuse.launch" if way == "dpfuse" else "torch.distributed.run"
    command = [sys.executable, "-m", launcher, "--nproc_per_node", str(RANKS), str(PROGRAM), way, str(folder), *words]
    if way != "dpfuse":
        command.insert(3, "--standalone")
    with open(folder / "printed", "w") as printed:
        environment = clean_environment(OMP_NUM_THREADS="1")
        return subprocess.Popen(command, env=environment, stdout=printed, stderr=printed, start_new_session=True)


def wait_for(happens: Callable[[], bool], job: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a job has come so far.

    Raises:
        RuntimeError: it has ended before, or has taken too long.
    """
    deadline = time.monotonic() + START
    while not happens():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job has not begun to train: {(folder / 'printed').read_text()}")
        time.sleep(0.01)


def end(job: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill what is left of a job: its launcher, and its ranks, which may outlive it."""
    told = filter(None, (fact(lines, "pid") for lines in notes_in(folder)))
    for pid in {*(family(job.pid) if job.poll() is None else ()), *filter(lambda pid: _is_of(pid, folder), told)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def _is_of(pid: int, folder: Path) -> bool:
    """Whether this is still the rank that has told its number, and no later process."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def notes_in(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the whole lines that each rank has written."""
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(RANKS)]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    return [[json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")] for text in texts]


def steps_of(told: Sequence[Mapping[str, Any]]) -> int:
    """Return how many steps a rank has made."""
    return max((line["step"] for line in told if "step" in line), default=0)


def fact(told: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return what a rank has told under this name; None if it has told nothing."""
    return next((line[name] for line in told if name in line), None)


def step_saved_in(folder: Path) -> int | None:
    """Return the step of the optimizer in the checkpoint of any of the ways; None without a whole one."""
    places = {
        "checkpoint.pt": lambda content: content["optimizer"],
        "checkpoint.ckpt": lambda content: content["optimizer_states"][0],
        "checkpoint/optimizer.bin": lambda content: content,
        "step-*.pt": lambda content: content["optimizer"],
    }
    for pattern, optimizer_of in places.items():
        for path in folder.glob(pattern):
            with suppress(RuntimeError, EOFError, OSError):  # it was cut short
                content = torch.load(path, map_location="cpu", weights_only=pattern != "checkpoint.ckpt")
                return int(optimizer_of(content)["state"][0]["step"])
    return None
