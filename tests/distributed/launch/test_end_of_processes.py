"""A process whose back end still has to call into Python waits for that before it ends."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dpfuse.comm import completion as landing
from dpfuse.engine.exchanges.hooked import _HookWork
from tests.distributed.processes import run

PROGRAM = """
import time
from datetime import timedelta
from threading import Thread
import torch
import torch.distributed as dist
from dpfuse.comm.completion import call_when_landed

store, groups = dist.HashStore(), {}
make = lambda rank: groups.update({rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))})
threads = [Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
work = groups[0].allreduce([torch.ones(4)])  # which waits for the other rank
call_when_landed(work, lambda: (time.sleep(0.5), print("called back", flush=True)))
groups[1].allreduce([torch.ones(4)])
"""


@pytest.mark.slow
def test_the_end_of_a_process_waits_for_what_is_called_back():
    ours = run("-c", PROGRAM, warm=False, GLOO_SOCKET_IFNAME="lo")
    assert (ours.returncode, ours.stdout) == (0, "called back\n"), ours.stderr


def test_it_waits_for_nothing_that_has_called_and_not_for_ever(group, monkeypatch):
    called = []
    work = dist.all_reduce(torch.ones(4), async_op=True)
    landing.call_when_landed(work, lambda: called.append(1))
    work.wait()
    landing._let_land()
    assert called == [1]
    assert not landing._awaited
    monkeypatch.setattr(landing, "PATIENCE", 0.05)
    stuck = torch.futures.Future()
    landing.call_when_landed(SimpleNamespace(get_future=lambda: stuck), lambda: None)
    landing._let_land()
    stuck.set_result(None)


def test_what_a_communication_hook_has_not_done_is_waited_for():
    future = torch.futures.Future()
    hook = _HookWork(future)
    with pytest.raises(RuntimeError, match="not done"):
        hook.wait(timedelta(milliseconds=1))
    assert len(landing._awaited) == 1
    future.set_result(None)
    assert not landing._awaited
    assert hook.wait(timedelta(milliseconds=1))
