"""A process that has imported torch and forks the ranks of one fault after another: they start in no time.

Reads one request per line, as JSON, and answers each with what it saw. A forked rank that fails leaves by the end of
this very program, as an ordinary one does: with hooks and exit code of the interpreter, and what C++ does at its end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's wrapper, and its checkpoints, import it when they are first used
import torch.distributed as dist

from dpfuse.job.rank_program import end_process
from tests.faults.faults import BY_NAME
from tests.faults.job import Job

__all__: list[str] = []

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE = 5.0  # seconds that a rank has from the moment it is no longer frozen
TICK = 0.01
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)  # before the first fork: threads do not survive it
    # Whoever a rank leaves behind becomes a child of this process.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # or each rank, at its end, would look through all of torch
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank in request["ranks"]:
            pid = os.fork()
            if pid == 0:
                play(rank, request)
                return
            pids.append(pid)
        print(json.dumps(watched(pids, request["limit"])), flush=True)


def play(rank: int, request: dict[str, Any]) -> None:
    """One rank of the program; raises what that raises."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    folder = Path(request["folder"])
    for descriptor, path, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        os.dup2(os.open(path, flags, 0o600), descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if request.get("whole"):
        gc.unfreeze()  # its end takes everything apart, as that of a program does
    fault, size = BY_NAME[request["name"]], request["size"]
    os.environ.update(request["variables"])
    timeout = timedelta(seconds=request["timeout"])
    if "store" in request:
        host, port = request["store"]
        store: dist.Store = dist.TCPStore(host, port, size, rank == 0, timeout=timeout)
    else:
        store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    torch.manual_seed(0)
    job = Job(rank, size, request["face"], fault.options, folder)
    job.tell(began=True)
    try:
        fault.program(job)
    except BaseException:
        job.tell(raised=True)
        raise
    job.tell(ended=True)
    if not request.get("whole"):
        end_process(0)  # as under the launcher; to take an interpreter apart takes longer than most programs
    dist.destroy_process_group()


def watched(pids: list[int], limit: float) -> dict[str, Any]:
    """Exit codes and times of the ranks; who is there after `limit` seconds is killed."""
    codes: dict[int, int | None] = {}
    ended: dict[int, float] = {}
    deadline = time.monotonic() + limit
    frozen: set[int] = set()
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid], ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
        if pid:
            continue
        waiting = [pid for pid in pids if pid not in codes]
        if not frozen and all(map(is_stopped, waiting)):
            # Its peers have given it up; as soon as it can, it must end, too.
            frozen.update(waiting)
            deadline = time.monotonic() + GRACE
            for pid in waiting:
                os.kill(pid, signal.SIGCONT)
        if time.monotonic() > deadline:
            for pid in waiting:
                os.kill(pid, signal.SIGUSR1)  # it prints where it is
            time.sleep(0.3)
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid], ended[pid] = None, time.monotonic()
        time.sleep(TICK)
    return {"codes": [codes[pid] for pid in pids], "ended": [ended[pid] for pid in pids], "left": end_those_left()}


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def end_those_left() -> int:
    """How many processes outlived the ranks; they do not outlive this."""
    left = 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
        _, status = os.waitpid(int(child), 0)
        left += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return left


if __name__ == "__main__":
    main()
