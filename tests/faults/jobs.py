"""Whole jobs that are ended: under dpfuse's launcher and under torchrun, or while they save. For the table.

In every run of the tests, others hold dpfuse to more than this: `test` names them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.distributed.processes import SCRIPTS, alive, all_gone, free_port, pids_in, run, start
from tests.faults.fault import RIGHT, Expected, Outcome, Verdict, named
from tests.faults.job import DDP
from tests.patience import patience

__all__ = ["JOB_FAULTS", "JobFault"]

KILLS = 12
LIMIT = 45.0  # seconds; torchrun kills ranks that do not end after 30
MODULES = {"dpfuse": "dpfuse.launch", DDP: "torch.distributed.run"}
LAUNCHER_TESTS = "tests/distributed/launch/test_launch.py"
ENDING_TESTS = "tests/distributed/launch/test_forced_end.py"
Launched = subprocess.Popen[str]


def job(face: str, script: str, *words: str, port: int | None = None) -> Launched:
    """Two ranks of a script, under the launcher that belongs to the face."""
    place = f"--master_port={free_port() if port is None else port}"
    return start("-m", MODULES[face], "--nproc_per_node=2", place, SCRIPTS / script, *words)


def begun(started: Launched) -> list[int]:
    """The ids of both ranks, once they run."""
    assert started.stdout
    return pids_in(started.stdout.readline() + started.stdout.readline())


def ended(started: Launched, pids: list[int], *words: str) -> Verdict:
    """The verdict on a job that has been told to end, or will by itself; what it printed must have `words`."""
    began = time.monotonic()
    try:
        with suppress(subprocess.TimeoutExpired):
            started.wait(patience(LIMIT))
        gone = all_gone([*pids, started.pid], within=2)
        seconds = round(time.monotonic() - began, 1)
        left = sum(map(alive, pids))
        if alive(started.pid):
            return Verdict(Outcome.HANG, seconds, left, f"killed after {LIMIT} s")
        if not gone:
            return Verdict(Outcome.ORPHANS, seconds, left, f"{left} ranks outlived the launcher")
        out, told = started.communicate(timeout=patience(10))
        detail = f"exit code {started.returncode}: {out}{told}"
        if not words:
            return Verdict(Outcome.RIGHT, seconds, 0, detail)
        missing = not started.returncode or any(word.lower() not in told.lower() for word in words)
        return Verdict(Outcome.UNNAMED if missing else Outcome.NAMED, seconds, 0, detail)
    finally:
        for pid in (*pids, started.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.communicate(timeout=patience(10))


def signalled(number: int) -> Callable[[str], Verdict]:
    """The launcher gets a signal while the ranks sleep."""

    def play(face: str) -> Verdict:
        started = job(face, "fail.py", "sleep")
        pids = begun(started)
        started.send_signal(number)
        return ended(started, pids)

    return play


def ignored(face: str) -> Verdict:
    """The launcher gets SIGTERM, and its ranks ignore it."""
    started, pids, read = job(face, "stubborn.py", "ignores"), [], ""
    assert started.stderr
    while len(pids) < 6:  # each rank with a child and a worker
        line = started.stderr.readline()
        if not line:
            break
        read += line
        pids = pids_in(read)
    started.send_signal(signal.SIGTERM)
    return ended(started, pids)


def failed(how: str) -> Callable[[str], Verdict]:
    """Rank 1 ends, while rank 0 waits for it."""

    def play(face: str) -> Verdict:
        started = job(face, "fail.py", how)
        return ended(started, begun(started), "rank 1" if face == "dpfuse" else "local_rank: 1")

    return play


def port_taken(face: str) -> Verdict:
    """Somebody else listens on the port that the job was given."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        return ended(job(face, "join.py", port=port), [], str(port))


def second_job(face: str) -> Verdict:
    """Two jobs at once, neither of which was given a port."""
    jobs = [start("-m", MODULES[face], "--nproc_per_node=2", SCRIPTS / "join.py") for _ in range(2)]
    verdicts = [ended(started, []) for started in jobs]
    codes = [started.returncode for started in jobs]
    worst = max(verdicts, key=lambda verdict: verdict.seconds)
    return Verdict(Outcome.UNNAMED if any(codes) else worst.outcome, worst.seconds, 0, str(codes))


def killed_while_saving(face: str) -> Verdict:
    """A process that saves checkpoints is killed at random moments."""
    began = time.monotonic()
    done = run(SCRIPTS / "kill_while_saving.py", "torch.save" if face == DDP else "dpfuse", KILLS, timeout=LIMIT)
    lost = json.loads(done.stdout)["lost"]
    seconds = round(time.monotonic() - began, 1)
    return Verdict(Outcome.LOST if lost else Outcome.RIGHT, seconds, 0, f"{lost} of {KILLS} kills lost the checkpoint")


@dataclass(frozen=True)
class JobFault:
    """As `fault.Fault`, of a job; `test` is where dpfuse is held to it."""

    name: str
    hazard: str
    done: str
    play: Callable[[str], Verdict]
    expected: Expected
    test: str


def gone(within: float) -> Expected:
    """Everybody has ended."""
    return Expected(Outcome.RIGHT, within=within)


OUTLIVES = f"{LAUNCHER_TESTS}::test_no_rank_outlives_the_launcher"
FAILS = f"{LAUNCHER_TESTS}::test_a_failing_rank_ends_the_job_is_named_and_gives_its_exit_code"
JOB_FAULTS = [
    JobFault("launcher_sigterm", "1f 42", "the launcher gets SIGTERM", signalled(signal.SIGTERM), gone(2), OUTLIVES),
    JobFault("launcher_sigint", "1f 42", "the launcher gets SIGINT", signalled(signal.SIGINT), gone(2), OUTLIVES),
    JobFault("launcher_sighup", "1f 42", "the launcher gets SIGHUP", signalled(signal.SIGHUP), gone(2), OUTLIVES),
    JobFault("launcher_sigkill", "1f 42", "the launcher is killed", signalled(signal.SIGKILL), gone(2), OUTLIVES),
    JobFault("sigterm_ignored", "1f 42", "the launcher gets SIGTERM, which its ranks ignore", ignored, gone(12),
                  f"{ENDING_TESTS}::test_the_launcher_is_asked_to_end_and_its_ranks_will_not"),
    JobFault("rank_raises", "1f 42", "rank 1 raises, rank 0 waits for it", failed("raise"), named("rank 1", within=5),
                  FAILS),
    JobFault("rank_raises_peer_sleeps", "1f 42", "rank 1 raises, rank 0 sleeps", failed("raise-while-peer-sleeps"),
                  named("rank 1", within=5), FAILS),
    JobFault("rank_exits", "1f 42", "rank 1 ends with exit code 3", failed("exit"), named("rank 1", within=5), FAILS),
    JobFault("rank_killed", "1f 42", "rank 1 is killed", failed("kill"), named("rank 1", within=5), FAILS),
    JobFault("port_taken", "1f 42", "the port of the job is taken", port_taken, named(within=10),
                  f"{LAUNCHER_TESTS}::test_a_taken_port_is_named"),
    JobFault("second_job", "1f 42", "two jobs on one machine", second_job, RIGHT,
                  "tests/distributed/launch/test_security.py::test_two_jobs_on_one_machine_do_not_meet"),
    JobFault("checkpoint_kill", "1f 44", f"{KILLS} times, a process is killed while it saves a checkpoint",
             killed_while_saving, RIGHT,
             "tests/distributed/model/test_checkpoint_files.py::test_no_kill_while_saving_loses_a_checkpoint"),
]  # fmt: skip
