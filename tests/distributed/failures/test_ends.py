"""Does each process of a job end soon after an error that nothing caught, with its traceback and its exit code?"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from dpfuse.liveness import process_exit
from tests.distributed.processes import SCRIPTS, clean_environment, free_port, run, start
from tests.patience import patience

pytestmark = pytest.mark.timeout(600)

SCRIPT = SCRIPTS / "alone.py"
WITHIN = 5.0  # seconds after the last error, of which torchrun and the launcher take most
LIMIT = 90  # seconds for a whole job, of which importing torch on a busy machine takes most
FACES = "DataParallel", "DistributedDataParallel"
COMMON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DPFUSE_BACKEND": "gloo"}
STARTS = {
    "plain": None,
    "launcher": ("-m", "dpfuse.launch", "--nproc_per_node", 2, SCRIPT),
    "torchrun": ("-m", "torch.distributed.run", "--nproc_per_node", 2, SCRIPT),
    "dpfuse": (SCRIPT,),
    "fork": (SCRIPT,),
    "spawn": (SCRIPT,),
}


def processes(how, call, face):
    """Those that a user starts, each with a group of its own for what it starts."""
    if how == "plain":
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **COMMON}
        return [start(SCRIPT, call, face, RANK=str(rank), **common) for rank in (0, 1)]
    words = [*STARTS[how], call, face, *([how] if how in ("dpfuse", "fork", "spawn") else [])]
    if how == "torchrun":
        words[2:2] = ["--master_port", free_port()]
    command = [sys.executable, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, env=clean_environment(**COMMON), start_new_session=True, **pipes)]


def end_of(how, call, face):
    """The exit codes, what was printed, and how many seconds after the last error the last process ended."""
    begun = processes(how, call, face)
    try:
        told = "".join("".join(each.communicate(timeout=patience(LIMIT))) for each in begun)
        ended = time.time()
    finally:
        for each in begun:
            each.kill()
            if how != "plain":
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
    raised = [float(when) for when in re.findall(r"raised=([\d.]+)", told)]
    return [each.returncode for each in begun], told, ended - max(raised, default=ended)


def check(how, call, face):
    codes, told, seconds = end_of(how, call, face)
    assert all(codes), (codes, told)
    assert "well" not in told
    # The launcher ends the other rank, which may not have raised yet.
    assert told.count("Traceback (most recent call last)") >= (1 if how == "launcher" else 2), told
    assert "DPFuseError" in told
    assert seconds < patience(WITHIN), told


@pytest.mark.slow
def test_a_job_ends_soon_after_rank_0_alone_has_run_a_collective():
    check("plain", "barrier", "DistributedDataParallel")


@pytest.mark.slow
@pytest.mark.parametrize("how", STARTS)
@pytest.mark.parametrize("call", ["barrier", "broadcast", "other group", "average by hand", "weights"])
def test_a_job_ends_soon_however_it_was_started(how, call):
    check(how, call, FACES[len(how + call) % 2])


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(6))
def test_a_job_ends_soon_each_time(attempt):
    check("plain", "barrier", FACES[attempt % 2])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_an_error_in_a_process_of_multiprocessing_is_named_by_its_peers(how):
    codes, told, _ = end_of(how, "raise", "DataParallel")
    assert codes == [1]
    assert "rank 0 ended with ValueError: invalid literal for int() with base 10: 'planted'" in told


def child(how):
    process_exit.announce_by(Heartbeat())
    try:
        raise ValueError("planted")
    except ValueError:
        if how == "raise":
            raise
        sys.exit(int(how))  # as torch's processes do


class Heartbeat:
    """Prints what it is asked to do."""

    beats = True

    def unannounced_end(self, code):
        return f"code {code}"

    def announce(self, end):
        print(f"announced {getattr(end, 'error', end)}", flush=True)

    def stop(self):
        print("stopped", flush=True)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("how", "code", "announced"), [("raise", 1, "ValueError: planted"), ("7", 7, "ValueError: planted"), ("0", 0, "")]
)
def test_the_reason_why_a_child_of_multiprocessing_ends_is_announced(capfd, how, code, announced):
    process = multiprocessing.get_context("fork").Process(target=child, args=(how,))
    process.start()
    process.join(patience(30))
    assert process.exitcode == code
    said, printed = capfd.readouterr()
    words = [f"announced {announced}"] * bool(announced)
    assert said.splitlines() == [*words, f"announced code {code}", "stopped"]
    assert ("ValueError: planted" in printed) is (how == "raise")


PROGRAM = """
import atexit, gc, sys, time
atexit.register(lambda: print("first registered"))
from dpfuse.liveness import process_exit

class Heartbeat:
    beats = True
    def unannounced_end(self, code): return code
    def announce(self, end): print("announced", getattr(end, "error", end))
    def stop(self): print("stopped")

class Late:
    def __del__(self): print("taken apart", flush=True)

process_exit.announce_by(Heartbeat())
atexit.register(lambda: print("last registered"))
late = Late()
late.itself = late
gc.disable()
if sys.argv[1] == "raise":
    raise ValueError("mine")
if sys.argv[1] == "hook":
    try:
        raise ValueError("mine")
    except ValueError:
        sys.excepthook(*sys.exc_info())
if sys.argv[1] == "exit":
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("how", "code", "apart"),
    [
        ("raise", 1, False),
        pytest.param("hook", 0, True, marks=pytest.mark.slow),
        pytest.param("exit", 7, True, marks=pytest.mark.slow),
        ("end", 0, True),
    ],
)
def test_python_is_not_taken_apart_after_an_error_that_nothing_caught(tmp_path, how, code, apart):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path / "program.py", how, warm=False)
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1 - apart] == "first registered"
    assert "last registered" in lines
    assert ("taken apart" in lines) is apart
    assert ("ValueError: mine" in done.stderr) is (how in ("raise", "hook"))
