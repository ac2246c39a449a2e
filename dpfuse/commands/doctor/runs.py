"""One run of the user's program by the doctor: starts it, watches its progress, and reads what it has left."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfuse.commands.doctor.run_request import DONE, OVER, UNWRAPPED, RunRequest, all_done
from dpfuse.commands.run_command import Program
from dpfuse.errors import DPFuseError
from dpfuse.startup import startup_variables
from dpfuse.trace_file import VARIABLE, RankTrace, read_folder

__all__ = ["TITLES", "TUNING", "Run", "RunSetup", "run_once"]

OBSERVER = "dpfuse.commands.doctor.observer"
TITLES = {
    "torch": "torch DDP",
    "dpfuse": "dpfuse",
    "torch buckets": "torch DDP, other buckets",
    "narrow": "dpfuse, 16 bits",
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
TUNING = 30  # steps that the tuner gets, more than it needs; those after are timed
STEP_OF = re.compile(rb'"kind":"step","step":\d+,"optimizer":(\d+)')
LOOK = 0.2  # seconds between two looks at the progress
ENDING = 300.0  # seconds in which the ranks that are behind end themselves, once one has made its steps
GRACE = 0.5  # seconds for processes that are not ranks, to write what they have read
SAY = 5.0  # seconds between two messages
STOP, STOP_AT_ONCE = 15.0, 0.5  # seconds for a run to end when it is asked to; after Ctrl-C
TAIL = 64 << 10  # bytes at the end of a log in which its last line is looked for


@dataclass(frozen=True)
class RunSetup:
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
        last_line: of what the ranks have printed; empty if they have printed nothing.
        load: tasks of the machine that were running or waiting for a core, for each of its cores, the mean.
    """

    number: int
    wrapper: str
    code: int | None
    seconds: float
    log: Path
    traces: dict[int, RankTrace] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    last_line: str = ""
    load: float = 0.0

    @property
    def title(self) -> str:
        """Its name in reports."""
        return f"run {self.number}, {TITLES[self.wrapper]}"

    @property
    def steps(self) -> int:
        """How many lines every rank has written."""
        return min((len(trace.steps) for trace in self.traces.values()), default=0)

    @property
    def of_optimizers(self) -> str:
        """What to add after the number of its steps where several optimizers have made them, as in a GAN."""
        count = len(self.traces[0].optimizers) if 0 in self.traces else 0
        return f" of {count} optimizers" if count > 1 else ""

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, or not at all."""
        return self.code != 0

    @property
    def derived(self) -> list[str]:
        """The classes of wrappers that derive from torch's or dpfuse's, which do not take each other's place."""
        return sorted({name for facts in self.facts.values() for name in facts["derived"]})

    @property
    def replaceable(self) -> bool:
        """Whether a rank has made a wrapper in whose place the other class can be put."""
        return any(facts["replaceable"] for facts in self.facts.values())

    @property
    def own(self) -> bool:
        """Whether the program has written dpfuse's class itself."""
        return any(facts["own"] for facts in self.facts.values())

    @property
    def numeric(self) -> list[str]:
        """The arguments of dpfuse's class, given by the program, with which numbers are not those of torch's class."""
        return sorted({name for facts in self.facts.values() for name in facts["numeric"]})

    @property
    def unwrapped(self) -> int:
        """How many steps an optimizer has made on ranks without a wrapper."""
        return max((facts["unwrapped"] for facts in self.facts.values()), default=0)

    @property
    def kept_log(self) -> str:
        """The name under which the doctor keeps what the ranks have printed, where the run has failed."""
        return f"run{self.number}.log"

    def reason(self) -> str:
        """Return why it has failed, in one line, with the rank where it is known."""
        if self.code is None:
            return "it made no step for too long, and was ended"
        errors = [
            (name, note) for name, facts in self.facts.items() for note in facts["findings"] if note["what"] == "error"
        ]
        # A rank that failed closes its connections, and the others then fail, too.
        errors.sort(key=lambda one: "onnection" in one[1]["text"])
        if errors:
            name, note = errors[0]
            lines = note["text"].strip().splitlines() or [""]
            first = lines[-1 if note["kind"] == "ProcessRaisedException" else 0]  # which tells of another process first
            where = f"rank {name} raised " if name.isdecimal() else ""  # a process that is no rank has another name
            return f"{where}{note['kind']}{f': {first}' if first else ''}"
        return f"exit code {self.code}{f': {self.last_line}' if self.last_line else ''}"

    @property
    def samplers(self) -> list[dict[str, Any]]:
        """The samplers that shuffle, of all ranks: the epochs of their passes, and whether these were set."""
        return [one for facts in self.facts.values() for one in facts["samplers"]]

    def behind(self, rank: int) -> int:
        """Return how many backwards of a rank were averaged since its last step."""
        return int(self.facts.get(str(rank), {}).get("behind", 0))

    def read(self) -> list[str]:
        """Return the files that it has read without having written them."""
        return sorted({path for facts in self.facts.values() for path in facts["read"]})


def run_once(setup: RunSetup, number: int, wrapper: str, say: Callable[[str], None]) -> Run:
    """Run the program once. Ctrl-C ends it at once.

    Args:
        setup: of the doctor.
        number: of the run, from 1.
        wrapper: a key of `TITLES`.
        say: gets a line now and then.
    """
    folder = setup.folder / f"run{number}"
    folder.mkdir()
    request = RunRequest(str(folder), wrapper, setup.steps, setup.deep, setup.own_ranks)
    environ = {**os.environ, **startup_variables(OBSERVER, os.environ), **request.variables()}
    environ |= offline(os.environ, folder)
    environ.pop(VARIABLE, None)  # the doctor traces by itself
    if setup.own_ranks:
        words = setup.program.words()
    else:
        words = [sys.executable, "-m", "dpfuse.launch", "--nproc_per_node", str(setup.ranks)]
        words += setup.program.words_for_launcher()
    run = Run(number, wrapper, None, 0.0, folder / "log.txt")
    began = time.monotonic()
    seconds = STOP
    with open(run.log, "wb") as log:
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            run.code, run.load = _watched(process, folder, setup, run.title, say)
        except KeyboardInterrupt:
            seconds = STOP_AT_ONCE
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            (folder / OVER).touch()
    run.seconds = time.monotonic() - began
    run.last_line = _last_line(run.log)
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
    process: subprocess.Popen[bytes], folder: Path, setup: RunSetup, title: str, say: Callable[[str], None]
) -> tuple[int | None, float]:
    """Wait for the end of a run; return its exit code, or None if it makes no progress, and the machine's load."""
    before, moved, said, text = (0, 0), time.monotonic(), time.monotonic(), ""
    loads = [0.0]
    while True:
        try:
            return process.wait(LOOK), statistics.mean(loads)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        loads.append(_load())
        if setup.own_ranks and all_done(folder):
            time.sleep(GRACE)
            os.killpg(process.pid, signal.SIGKILL)  # also a shell, which has code after the ranks
            process.wait()
            return 0, statistics.mean(loads)
        progress = _progress(folder)
        if progress != before:
            before, moved = progress, now
        elif now - moved > (max(setup.patience, ENDING) if list(folder.glob(f"{DONE}*")) else setup.patience):
            return None, statistics.mean(loads)
        if now - said > SAY:
            said, last = now, text
            done = max([progress[1], *map(_steps, folder.glob("rank*.jsonl"))])
            text = f"step {done} of {setup.steps}" if done else "starting"
            if text != last:
                say(f"{title}: {text}")


def _load() -> float:
    """Return how many tasks of the machine run or wait for a core now, without this one, for each of its cores."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return (int(file.read().split()[3].partition("/")[0]) - 1) / (os.cpu_count() or 1)
    except OSError:  # not on Linux
        return os.getloadavg()[0] / (os.cpu_count() or 1)


def _last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _progress(folder: Path) -> tuple[int, int]:
    """Return what grows with the steps: the size of all traces, and the steps of the rank without one."""
    counted = [path.stat().st_size for path in folder.glob(f"{UNWRAPPED}*")]
    return sum(path.stat().st_size for path in folder.glob("rank*.jsonl")), max(counted, default=0)


def _steps(trace: Path) -> int:
    """Return how many steps the optimizer has made that has made most: a GAN has two, and a run ends with the first."""
    return max(Counter(STEP_OF.findall(trace.read_bytes())).values(), default=0)
