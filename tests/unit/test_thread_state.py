"""What a thread does, as another thread reads it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dpfuse.liveness.thread_state import thread_state


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
                "gloo", store=dist.PrefixStore("a", store), rank=0, world_size=2, timeout=timedelta(seconds=1)
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
