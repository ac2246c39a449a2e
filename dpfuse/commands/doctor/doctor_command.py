"""`dpfuse doctor`: runs the program in turns, and writes a page, a JSON and a summary."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from dpfuse.commands.doctor.changed_files import MOST, Snapshot, folders_of, snapshot
from dpfuse.commands.doctor.failed_runs import outcome, reasons
from dpfuse.commands.doctor.findings import findings_of, remarks_of
from dpfuse.commands.doctor.output_folder import REPORT, make_folder
from dpfuse.commands.doctor.page import page
from dpfuse.commands.doctor.result import DoctorResult
from dpfuse.commands.doctor.runs import TITLES, Run, RunSetup, run_once
from dpfuse.commands.doctor.same_numbers import EXACT_RANKS, judge
from dpfuse.commands.doctor.speed import ADVISED, COMPARED, measure, to_try
from dpfuse.commands.doctor.summary import summary
from dpfuse.commands.run_command import Program
from dpfuse.errors import DPFuseError

__all__ = ["DoctorRequest", "doctor"]

PAGE = "doctor.html"
ALTERNATING = ("torch", "dpfuse", "torch", "dpfuse")  # the runs that are compared
RANKS_WITHOUT_GPUS = 2
HEARD = 120.0  # seconds without a step, after which dpfuse has said who waits for whom, unless it waits for ever
DEEP = 10  # steps that are hashed in full, at most a quarter of all


@dataclass(frozen=True)
class DoctorRequest:
    """What the command line asks for.

    Args:
        program: of the user.
        ranks: to start; None takes one per GPU, or two.
        own_ranks: whether the program starts its ranks itself.
        steps: of each run.
        patience: seconds without a step, after which a run is ended.
        out: the folder for the report.
    """

    program: Program
    ranks: int | None
    own_ranks: bool
    steps: int
    patience: float
    out: Path


def doctor(request: DoctorRequest, arguments: list[str]) -> int:
    """Run, compare, print and write.

    Args:
        request: what to do.
        arguments: of the command line.

    Returns:
        0 if nothing is wrong, 1 if something is, 2 if nothing can be said, 130 after Ctrl-C.

    Raises:
        DPFuseError: there is no such program, the folder cannot be written, or this process is a rank of a job.
    """
    request.program.check()
    if "WORLD_SIZE" in os.environ:
        raise DPFuseError(
            f"got a job of WORLD_SIZE={os.environ['WORLD_SIZE']} around the doctor, which starts its ranks itself; "
            "expected none. Run it without a launcher, and pass --ranks"
        )
    make_folder(request.out)
    with _signals_as_exceptions(), _own_folder() as folder:
        report = _examined(request, folder, arguments)
        _keep_logs(report, request.out)
        (request.out / REPORT).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        (request.out / PAGE).write_text(page(report), encoding="utf-8")
    print(f"{summary(report)}\n{'page':<17}{request.out / PAGE}")
    return report.exit_code


def _examined(request: DoctorRequest, folder: Path, arguments: list[str]) -> DoctorResult:
    ranks = request.ranks or _gpus() or RANKS_WITHOUT_GPUS
    deep = max(2, min(DEEP, request.steps // 4))
    setup = RunSetup(request.program, ranks, request.own_ranks, request.steps, deep, request.patience, folder)
    roots = folders_of(request.program.arguments, request.out.resolve())
    _say(
        f"your program will run several times, and writes its own files each time. Looked at for changes: "
        f"{', '.join(roots)}. Each run ends after {request.steps} steps of an optimizer, before code after the loop"
    )
    series = _Series(setup, roots, request.out.resolve())
    failure = failed_under = interrupted = ""
    other = None
    try:
        for wrapper in ALTERNATING:
            run = series.run(wrapper)
            if run.failed or not run.traces or not run.replaceable:
                failed_under = wrapper if run.failed else ""
                failure = _failure(run)
                if failed_under == "torch":
                    ours = next((one for one in series.runs if one.wrapper == "dpfuse"), None) or series.run(
                        "dpfuse", HEARD
                    )
                    failure = f"{failure}; {outcome(ours)}"
                break
        else:
            if len(series.runs[0].traces) > EXACT_RANKS:
                other = series.run("torch buckets")
            trial = to_try(series.runs, deep)
            if trial:  # where it fails, nothing is advised
                series.run(trial)
    except KeyboardInterrupt:
        interrupted = series.title
        _say(f"interrupted in {interrupted}; the report has what was found before")
    _ignore_interrupts()  # what follows takes a moment, and would lose all runs
    runs = series.runs
    by = {name: [run for run in runs if run.wrapper == name] for name in TITLES}
    numbers = None
    if not failure and by["torch"] and by["dpfuse"]:
        numbers = judge(by["torch"], by["dpfuse"], other, series.read_again())
    compared = [run for run in runs if run.wrapper in COMPARED]
    speed = measure(runs, deep)
    # Torch takes memory, and seconds of a core, so it is not imported beside the runs.
    import torch

    from dpfuse.commands.doctor.too_few_steps import too_few_steps
    from dpfuse.commands.machine import machine_facts, software_versions

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts: dict[str, Any] = {
        "date": now,
        "ranks": ranks,
        "machine": machine_facts(torch.device("cuda" if _gpus() else "cpu")),
        "versions": software_versions(),
    }
    findings, remarks = findings_of(compared, speed), remarks_of(compared, speed.link)
    if failed_under == "torch":
        findings = (*(one for run in compared if run.wrapper == "dpfuse" for one in reasons(run)), *findings)
    codes = [one.code for one in (*findings, *remarks)]
    return DoctorResult(
        shlex.join(["dpfuse", *arguments]),
        runs,
        numbers,
        speed,
        findings,
        remarks,
        series.changed,
        failure,
        failed_under,
        facts,
        interrupted,
        () if failure else too_few_steps([run for run in compared if run.wrapper == "dpfuse"], codes),
    )


def _gpus() -> int:
    from dpfuse.job.devices import visible_gpus

    return visible_gpus()


class _Series:
    """The runs so far, and the files that each has changed.

    Args:
        setup: of all runs.
        roots: folders to look at.
        out: the folder of the report, which is left out.

    Attributes:
        title: of the run in progress, or of the last one.
    """

    def __init__(self, setup: RunSetup, roots: list[str], out: Path) -> None:
        self.runs: list[Run] = []  # those that have ended by themselves
        self.title = ""
        self.changed: dict[str, list[str]] = {}
        self._setup = setup
        self._look: Callable[[], Snapshot] = lambda: snapshot(roots, out)
        self._before = self._look()
        if not self._before.complete:
            _say(f"a folder has more than {MOST:,} files, of which the others are not looked at for changes")

    def run(self, wrapper: str, patience: float = 0.0) -> Run:
        """Run the program once more, with at least this patience."""
        number = len(self.runs) + 1
        self.title = f"run {number}, {TITLES[wrapper]}"
        _say(self.title)
        try:
            setup = replace(self._setup, patience=max(patience, self._setup.patience))
            run = run_once(setup, number, wrapper, _say)
        finally:  # an interrupted run changes files, too
            now = self._look()
            self.changed[self.title] = now.changed_since(self._before)
            self._before = now
        self.runs.append(run)
        steps = run.steps or run.unwrapped
        # With more ranks, DDP runs with other buckets, too. Whether a run of advice follows is not known yet.
        left = len(ALTERNATING) + (len(run.traces) > EXACT_RANKS) - number
        seconds = left * sum(each.seconds for each in self.runs) / number
        rest = f"; about {seconds:.0f} s are left" if left > 0 and not run.failed else ""
        _say(f"{self.title}: {steps} steps{run.of_optimizers} in {run.seconds:.1f} s, exit code {run.code}{rest}")
        return run

    def read_again(self) -> list[str]:
        """Return files that a run has changed and a later one has read, apart from a run of advice."""
        found: list[str] = []
        written: set[str] = set()
        for run in self.runs:
            if run.wrapper in ADVISED:
                continue
            found += [path for path in run.read() if path in written and path not in found]
            written |= set(self.changed[run.title])
        return found


def _failure(run: Run) -> str:
    under = TITLES[run.wrapper]
    if not run.failed and run.derived:
        names = ", ".join(run.derived)
        if run.own:
            return f"{names} derives from a class of dpfuse, and torch's cannot take its place, so nothing is compared"
        return (
            f"{names} derives from torch's DistributedDataParallel, and dpfuse does not replace it, so nothing is "
            "compared; expected torch's class itself. Derive it from dpfuse.DistributedDataParallel, or make torch's "
            "class"
        )
    if not run.failed and run.unwrapped:
        return (
            f"the program made no DistributedDataParallel under {under} before an optimizer had made {run.unwrapped} "
            "steps; expected a data-parallel training with torch's class or dpfuse's, and not another one, such as "
            "FSDP. If a model is wrapped later, pass more --steps"
        )
    if not run.failed:
        return (
            f"the program made no DistributedDataParallel, or no step of an optimizer, under {under}; expected a "
            "data-parallel training. Does it need other arguments or more ranks?"
        )
    if run.wrapper == "torch":
        under = f"{under}, which stands in the place of dpfuse's class" if run.own else under
        return f"the program fails under {under}, in run {run.number}, so dpfuse cannot be compared: {run.reason()}"
    return f"the program runs under torch DDP and fails under {under}, in run {run.number}: {run.reason()}"


def _keep_logs(report: DoctorResult, out: Path) -> None:
    """Copy what the ranks have printed where a run has failed."""
    for run in report.runs:
        if run.failed and run.log.exists():
            shutil.copyfile(run.log, out / run.kept_log)


def _ignore_interrupts() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Make SIGTERM, SIGHUP and SIGINT exceptions, so that the run in progress is ended and the folder removed."""

    def end(number: int, _: Any) -> NoReturn:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would cut the report short
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    # `nohup` has a process ignore the second, and a shell the third in the background.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


@contextmanager
def _own_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dpfuse-doctor-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _say(text: str) -> None:
    print(f"dpfuse doctor: {text}", file=sys.stderr, flush=True)
