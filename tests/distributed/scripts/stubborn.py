"""Ranks that do not end when asked, in the way that the first argument names; rank 1 fails if there is a second one.

Each has a child that ignores SIGTERM and a busy worker of a DataLoader that does, too, unless its rank is to raise: the
end of a program waits for workers. All print their process ids. Idle ranks have a worker only, which waits for work.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from torch.utils.data import DataLoader

import dpfuse.job as distributed

HOW, FAULT = [*sys.argv[1:], ""][:2]
SLEEPER = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'.'); time.sleep(120)"

SPOKEN = os.pipe()  # to a rank from its worker, which is a fork


def tell(pid: int) -> None:
    os.write(2, f"pid={pid}\n".encode())  # in one piece, at once


def fails() -> bool:
    return bool(FAULT) and distributed.get_rank() == 1


class Busy:
    """A dataset whose worker is stuck in its first sample."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if fails() else signal.SIG_IGN)
        tell(os.getpid())
        os.write(SPOKEN[1], b".")
        time.sleep(0 if HOW == "idle" else 120)
        return index


def main() -> None:
    if HOW not in ("obedient", "idle"):
        # A handler, not SIG_IGN: it runs only where Python comes to run it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
    if HOW != "idle":
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
        child.stdout.read(1)  # it ignores SIGTERM from now on
        tell(child.pid)
    batches = iter(DataLoader(Busy(), num_workers=1, multiprocessing_context="fork"))
    os.read(SPOKEN[0], 1)
    distributed.init_parallel_env()  # which waits for the other ranks
    tell(os.getpid())
    if fails():
        time.sleep(3)  # so that others can see what it has started
        if FAULT == "thread":
            threading.Thread(target=time.sleep, args=(120,)).start()
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted")
    if HOW == "in C":
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        while lock(mutex) == 0:  # for the second time it waits for ever, and holds the GIL
            pass
    while time.sleep(120) is None:
        next(batches)


if __name__ == "__main__":
    main()
