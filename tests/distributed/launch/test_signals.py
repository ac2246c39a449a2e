"""SIGUSR1 and SIGUSR2 reach each rank and end nothing; SIGTERM asks once; a job under `nohup` ignores SIGHUP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.distributed.processes import ROOT, SCRIPTS, all_gone, clean_environment, pids_in, run
from tests.patience import patience

pytestmark = pytest.mark.timeout(120)

SCRIPT = SCRIPTS / "signalled.py"
USR1, USR2, TERM, HUP = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP


class Job:
    """A launcher in a process group of its own, and what its ranks have printed so far."""

    def __init__(self, folder, *words, ignored=(), **variables):
        def at_start():
            for number in (*ignored, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        self.folder, self.read, self.pids = folder, "", []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dpfuse.launch", *map(str, words)],
            env=clean_environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=at_start,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        ended = self.process.poll() is not None and all_gone(self.pids, within=10)
        for pid in () if ended else (*self.pids, self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        assert ended

    def wait_for_ranks(self, count=2):
        while len(self.pids) < count:
            self.read_line()
            self.pids = pids_in(self.read)

    def wait_for(self, *texts):
        while not all(text in self.read for text in texts):
            self.read_line()

    def read_line(self):
        line = self.process.stdout.readline()
        assert line, f"the job ended early: {self.read}{self.process.stderr.read()}"
        self.read += line

    def send(self, number, to):
        if to in ("launcher", "all"):
            self.process.send_signal(number)
        if to == "group":
            os.killpg(self.process.pid, number)
        if to in ("ranks", "all"):
            for pid in self.pids:
                os.kill(pid, number)

    def let(self, what):
        (self.folder / what).touch()

    def ended(self, within=30):
        """The exit code and all that was printed."""
        out, told = self.process.communicate(timeout=patience(within))
        self.read += out
        return self.process.returncode, told


def job(folder, how, *words, **variables):
    return Job(folder, "--nproc_per_node=2", *words, SCRIPT, folder, how, **variables)


def both(text):
    return f"rank 0 {text}\n", f"rank 1 {text}\n"


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (USR1, "launcher"),
        *(pytest.param(USR1, to, marks=pytest.mark.slow) for to in ("group", "ranks", "all")),
        *(pytest.param(USR2, to, marks=pytest.mark.slow) for to in ("launcher", "group", "ranks", "all")),
    ],
)
def test_a_signal_reaches_each_rank_and_ends_nothing(number, to, tmp_path):
    with job(tmp_path, "early") as started:
        started.wait_for_ranks()
        started.send(number, to)
        started.wait_for(*both(f"got {number.name}"))
        started.let("end")
        assert started.ended() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "all"])
def test_a_signal_that_comes_before_the_handler_is_kept_for_it(to, tmp_path):
    with job(tmp_path, "late") as started:
        started.wait_for_ranks()
        started.send(USR1, to)
        started.send(USR2, to)
        time.sleep(0.5)  # so that the handler would come too late
        started.let("go")
        started.wait_for(*both("got SIGUSR1"), *both("got SIGUSR2"))
        started.let("end")
        assert started.ended() == (0, "")
        assert started.read.count("got SIGUSR1") == 2  # once on each rank


STARTS_SLOWLY = """
import os, sys, time
if any(word.endswith("rank_program.py") for word in sys.orig_argv):
    os.write(1, f"pid={os.getpid()}\\n".encode())
    while not os.path.exists(os.path.join(os.environ["TEST_FOLDER"], "started")):
        time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "all"])
def test_a_signal_that_comes_while_python_starts_is_kept_as_well(to, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STARTS_SLOWLY)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels")])
    with job(tmp_path, "early", PYTHONPATH=path, TEST_FOLDER=str(tmp_path)) as started:
        started.wait_for_ranks()
        started.send(USR1, to)
        started.let("started")
        started.wait_for(*both("got SIGUSR1"))
        started.let("end")
        assert started.ended() == (0, "")


@pytest.mark.slow
def test_a_program_without_a_handler_is_not_ended_and_its_children_start_as_usual(tmp_path):
    with job(tmp_path, "never") as started:
        started.wait_for_ranks()
        for number in (USR1, USR2, USR1):
            started.send(number, "all")
            time.sleep(0.1)
        started.let("end")
        # The last signals may come when the launcher ends.
        deadline = time.monotonic() + patience(30)
        while started.process.poll() is None and time.monotonic() < deadline:
            started.process.send_signal(USR1)
            time.sleep(0.02)
        assert started.ended() == (0, "")
        assert {f"rank {rank} child 0 0 0 0" for rank in (0, 1)} <= {*started.read.splitlines()}


@pytest.mark.slow
def test_sigterm_asks_once_and_a_rank_that_has_ended_does_not_hurry_the_others(tmp_path):
    with job(tmp_path, "saves", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="60") as started:
        started.wait_for_ranks()
        started.process.send_signal(TERM)
        for number in (TERM, USR1, HUP):
            time.sleep(0.2)
            started.process.send_signal(number)
        code, told = started.ended()
        assert "rank 1 saved" in started.read
        assert (code, told.splitlines()[-1]) == (143, "dpfuse.launch: got SIGTERM; every rank was ended")


@pytest.mark.slow
def test_a_job_that_was_asked_to_end_is_not_restarted(tmp_path):
    with job(tmp_path, "never", "--max_restarts=3") as started:
        started.wait_for_ranks()
        started.process.send_signal(TERM)
        assert started.ended()[0] == 143
        assert len(pids_in(started.read)) == 2


@pytest.mark.slow
def test_time_runs_from_the_first_signal_and_others_do_not_add_to_it(tmp_path):
    words = ("--nproc_per_node=2", SCRIPTS / "stubborn.py", "ignores")
    with Job(tmp_path, *words, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3") as started:
        line = ""
        while len(started.pids) < 6:
            line += started.process.stderr.readline()
            started.pids = pids_in(line)
        began = time.monotonic()
        for _ in range(5):
            started.process.send_signal(TERM)
            time.sleep(0.5)
        assert started.ended()[0] == 143
        assert 3 - 0.5 < time.monotonic() - began < 3 + patience(5)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["group", "all"])
def test_under_nohup_a_job_goes_on(to, tmp_path):
    with job(tmp_path, "early", ignored=[HUP]) as started:
        started.wait_for_ranks()
        started.send(HUP, to)
        time.sleep(0.5)
        started.process.send_signal(USR1)
        started.wait_for(*both("got SIGUSR1"))
        started.let("end")
        assert started.ended() == (0, "")


TRAPS = """
echo pid=$$
cd $1
while [ ! -e go ]; do sleep 0.05; done
trap 'echo got' USR1
echo ready
while [ ! -e end ]; do sleep 0.05; done
"""


@pytest.mark.slow
def test_a_command_gets_signals_once_it_has_a_handler(tmp_path):
    (tmp_path / "job.sh").write_text(TRAPS)
    words = ["--nproc_per_node=1", "--no-python", "sh", tmp_path / "job.sh", tmp_path]
    with Job(tmp_path, *words) as started:
        started.wait_for_ranks(1)
        started.process.send_signal(USR1)  # which would end it
        time.sleep(0.5)
        started.let("go")
        started.wait_for("ready")
        started.process.send_signal(USR1)
        started.wait_for("got")
        started.let("end")
        assert started.ended() == (0, "")


IN_A_RANK = """
import asyncio, faulthandler, os, runpy, signal, threading, time
names = runpy.run_path(PATH, run_name="dpfuse_rank_program")
signal.pthread_sigmask(signal.SIG_BLOCK, names["KEPT_SIGNALS"])  # as the launcher starts a rank
os.kill(os.getpid(), signal.SIGUSR1)
names["keep_signals"]()
got = []
handler = lambda number, frame: got.append(number)
child = os.fork()
if child == 0:  # which has none of the signals of its parent
    signal.signal(signal.SIGUSR1, handler)
    os._exit(len(got))
print("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(signal.signal(signal.SIGUSR1, handler).name, got, signal.getsignal(signal.SIGUSR1) is handler)
print(signal.signal(signal.SIGUSR1, signal.SIG_DFL) is handler, signal.getsignal(signal.SIGUSR1).name)
os.kill(os.getpid(), signal.SIGUSR1)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, handler)
print("ignored", got)
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
faulthandler.register(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
faulthandler.unregister(signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
waiter = threading.Thread(target=lambda: print(signal.sigwait([signal.SIGUSR2]).name))
waiter.start()
os.kill(os.getpid(), signal.SIGUSR2)
waiter.join()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
os.kill(os.getpid(), signal.SIGUSR2)
async def main():
    called = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, called.set)
    await asyncio.wait_for(called.wait(), 20)
asyncio.run(main())
os.kill(os.getpid(), signal.SIGUSR2)  # asyncio has removed its handler
print("end")
"""


def test_programs_that_use_signals_in_other_ways_do_what_they_always_do():
    done = run("-c", IN_A_RANK.replace("PATH", repr(str(ROOT / "dpfuse" / "job" / "rank_program.py"))), warm=False)
    assert done.returncode == 0, done.stderr
    got = f"[{int(USR1)}]"
    shown = ["fork 0", f"SIG_DFL {got} True", "True SIG_DFL", f"ignored {got}", "SIGUSR2", "end"]
    assert done.stdout.splitlines() == shown
    assert re.match(r"Current thread .* \(most recent call first\)", done.stderr)
