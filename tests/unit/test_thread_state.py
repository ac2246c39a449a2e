"""What a thread does, as another thread reads it."""

from __future__ import annotations

import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dpfuse.liveness.thread_state import thread_state
from tests.patience import patience
from tests.warm import warm_python

# Threads that Python does not know enter it and leave it, as those of torch do that call a hook or a callback.
CROWD = """
import ctypes, threading, time
from dpfuse.liveness.thread_state import thread_state

library = ctypes.CDLL(None)
enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda nothing: None)
end, seen = time.monotonic() + 2, set()

def runs():
    now = time.monotonic()
    return now < end or ("crowd" not in seen and now < end + 40)  # on a busy machine it is seen late

def crowd():
    while runs():
        threads = [ctypes.c_ulong() for _ in range(8)]
        for thread in threads:
            library.pthread_create(ctypes.byref(thread), None, enter, None)
        for thread in threads:
            library.pthread_join(thread, None)

others = [threading.Thread(target=crowd) for _ in range(2)]
for other in others:
    other.start()
while runs():
    seen.add(thread_state(others[0].ident).at.rpartition(" ")[2])
print("crowd" in seen)
"""

# Each object that the reader makes may start a collection, whose finalizer lets the thread that is read go on.
COLLECTING = """
import gc, threading, time
from dpfuse.liveness.thread_state import thread_state

class Waits:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        time.sleep(0.0005)

def deep(left):
    return deep(left - 1) if left else sum(range(30))

def read(thread):
    global reads
    gc.set_threshold(2, 1, 1)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        Waits(), Waits()
        reads += "in deep" in thread_state(thread).at

reads = 0
reader = threading.Thread(target=read, args=(threading.get_ident(),))
reader.start()
while reader.is_alive():
    deep(60)
print(reads > 5)
"""


def test_the_line_of_the_user_is_found_behind_libraries():
    end = threading.Event()
    thread = threading.Thread(target=lambda: end.wait(20))
    thread.start()
    try:
        state = thread_state(thread.ident)
    finally:
        end.set()
        thread.join()
    assert state.at.startswith("test_thread_state.py:")
    assert state.at.endswith(" in <lambda>")
    assert state.call == ""
    assert state.cpu is not None


def test_a_collective_that_blocks_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def join():
        with pytest.raises(dist.DistError):
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("a", store), rank=0, world_size=2, timeout=timedelta(seconds=2)
            )

    thread = threading.Thread(target=join)
    thread.start()
    found = set()
    while thread.is_alive():
        found.add(thread_state(thread.ident).call)
        time.sleep(0.05)
    thread.join()
    assert "init_process_group" in found


def test_a_thread_that_has_ended_does_nothing():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread_state(thread.ident) == ("", "", None)


@pytest.mark.parametrize(
    "program",
    [pytest.param(CROWD, id="threads come and go", marks=pytest.mark.slow), pytest.param(COLLECTING, id="collections")],
)
def test_nothing_harms_the_reader(program):
    done = subprocess.run(
        [warm_python(), "-c", program], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
