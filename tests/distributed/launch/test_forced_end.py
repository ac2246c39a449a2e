"""How the launcher and spawn end ranks that will not end: killed in time, with all that they have started."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from dpfuse.job.paddle_launch_flags import parse
from tests.distributed.processes import SCRIPTS, alive, all_gone, pids_in, start
from tests.patience import patience
from tests.torch_ddp import since_torch

LIMIT = 12.0  # seconds, of which ranks get eight to end by themselves
DELAY = 3.0  # until rank 1 fails
SCRIPT = SCRIPTS / "stubborn.py"


def started(job, count=6):
    """The ids of the ranks, their children and their workers, once all have told theirs."""
    read, pids = "", []
    while len(pids) < count:
        line = job.stderr.readline()
        assert line, f"the job ended early: {read}"
        read += line
        pids = pids_in(read)
    return pids


def ended(job, pids, within):
    """Return the seconds until all of `pids` have ended, and what was printed; fail after `within` seconds.

    On a busy machine, it waits longer.
    """
    began = time.monotonic()
    try:
        assert all_gone(pids, within), f"still there after {within} s: {[*filter(alive, pids)]}"
        seconds = time.monotonic() - began
        print(f"ended after {seconds:.1f} s")  # shown by pytest -rP
        return seconds, job.communicate(timeout=patience(20))[1]
    finally:
        for pid in (*pids, job.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=patience(10))


def launched(*words, warm=True, **variables):
    return start("-m", "dpfuse.launch", "--nproc_per_node=2", *words, warm=warm, **variables)


def cases(first, *others):
    """The first case with two seconds to end, and all with the usual eight."""
    return [(*first, 2), *((*case, 8) for case in (first, *others))]


def shortened(time_to_end):
    return {} if time_to_end == 8 else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(time_to_end)}


def test_ranks_get_eight_seconds_to_end_if_nothing_else_is_said():
    assert parse(["--nproc_per_node=2", str(SCRIPT)]).seconds_to_end == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "fault", "time_to_end"),
    cases(("in C", "raise"), ("in C", "kill"), ("ignores", "raise"), ("ignores", "kill")),
)
def test_a_peer_failed_and_the_others_will_not_end(how, fault, time_to_end):
    job = launched(SCRIPT, how, fault, **shortened(time_to_end))
    pids = started(job)
    seconds, told = ended(job, pids, LIMIT + DELAY)
    # The others got their seconds to end. Of the delay, some may pass before this test has read all ids.
    assert seconds > DELAY + time_to_end - patience(1)
    assert job.returncode == (1 if fault == "raise" else 137)
    assert "dpfuse.launch: rank 1 " in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "time_to_end"),
    cases(("ignores", signal.SIGTERM), ("ignores", signal.SIGINT), ("in C", signal.SIGTERM), ("in C", signal.SIGHUP)),
)
def test_the_launcher_is_asked_to_end_and_its_ranks_will_not(how, number, time_to_end):
    job = launched(SCRIPT, how, **shortened(time_to_end))
    pids = started(job)
    job.send_signal(number)
    seconds, told = ended(job, pids, LIMIT)
    assert seconds > time_to_end - 1
    assert (job.returncode, told.splitlines()[-1]) == (
        128 + number,
        f"dpfuse.launch: got {number.name}; every rank was ended",
    )


@pytest.mark.slow
def test_asked_twice_it_waits_no_longer():
    job = launched(SCRIPT, "ignores", **shortened(100))
    pids = started(job)
    job.send_signal(signal.SIGINT)
    time.sleep(patience(1))  # two signals at one time are one
    job.send_signal(signal.SIGINT)
    seconds, _ = ended(job, pids, within=7)
    assert seconds < 90  # not the hundred seconds after a single signal
    assert job.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_what_an_obedient_rank_has_started_ends_with_it(fault):
    job = launched(SCRIPT, "obedient", fault)
    ended(job, started(job), within=DELAY + 7)
    assert job.returncode == (1 if fault == "raise" else 137)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [pytest.param(["--shutdown_timeout=2"], marks=since_torch(2, 12, "no such flag")), []]
)
def test_the_time_to_end_can_be_chosen(words):
    job = launched(*words, SCRIPT, "ignores", "raise", **({} if words else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}))
    seconds, _ = ended(job, started(job), within=DELAY + 5)
    assert seconds > 2


@pytest.mark.slow
def test_a_rank_that_failed_but_cannot_end_is_ended():
    job = launched(SCRIPT, "obedient", "thread", **shortened(2))
    _, told = ended(job, started(job), within=DELAY + 5)
    assert "failed, but did not end in 2 s; it ends now" in told
    assert "dpfuse.launch: rank 1 " in told
    assert job.returncode == 1


@pytest.mark.slow
def test_a_restart_leaves_nothing_of_the_attempt_before():
    job = launched("--max_restarts=1", SCRIPT, "ignores", "kill", **shortened(2))
    first = started(job)
    second = started(job)
    assert all_gone(first, within=0.5)
    ended(job, second, within=DELAY + 5)


@pytest.mark.slow
def test_what_ranks_leave_behind_after_they_ended_well_is_theirs():
    job = start("-m", "dpfuse.launch", "--nproc_per_node=1", SCRIPTS / "leaves_a_child.py", warm=True)
    out, _ = job.communicate(timeout=patience(60))
    (child,) = pids_in(out)
    try:
        assert job.returncode == 0
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("in C", "raise"),
        ("in C", "kill"),
        ("ignores", "raise"),
        ("ignores", "kill"),
    ],
)
def test_spawn_ends_ranks_that_will_not_end(how, fault):
    job = start(SCRIPTS / "spawn_stubborn.py", how, fault, warm=True)
    _, told = ended(job, started(job), LIMIT + DELAY)
    assert job.returncode == 1
    assert "spawn: rank 1 " in told


@pytest.mark.slow
def test_spawn_ends_them_on_ctrl_c():
    job = start(SCRIPTS / "spawn_stubborn.py", "ignores")
    pids = started(job)
    job.send_signal(signal.SIGINT)
    _, told = ended(job, pids, LIMIT)
    assert "KeyboardInterrupt\n" in told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_outlives_a_parent_that_cannot_end_its_ranks(number):
    """The kernel ends the ranks, and DataLoaders' workers that wait for work see that their rank is gone."""
    job = start(SCRIPTS / "spawn_stubborn.py", "idle")
    pids = started(job, 4)
    job.send_signal(number)
    ended(job, pids, LIMIT)


@pytest.mark.slow
def test_nobody_outlives_a_launcher_that_is_killed():
    job = launched(SCRIPT, "idle", warm=False)
    pids = started(job, 4)
    job.send_signal(signal.SIGKILL)
    ended(job, pids, LIMIT)
