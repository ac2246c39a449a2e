"""The end of a job on two machines: the one with the store leaves last."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from datetime import timedelta
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerState

from dpfuse.job import shutdown
from dpfuse.job.shutdown import machine_0_leaves_last
from tests.patience import patience


class Slow:
    """A store whose machine sleeps before it waits: until the first one has left, if it leaves in so many seconds."""

    def __init__(self, store, left, within):
        self._store, self._left, self._within = store, left, within

    def __getattr__(self, name):
        return getattr(self._store, name)

    def wait(self, *args):
        self._left.wait(self._within)
        self._store.wait(*args)


def agent(rank, store):
    group = SimpleNamespace(group_rank=rank, group_world_size=2, state=WorkerState.SUCCEEDED)
    return SimpleNamespace(_worker_group=group, _store=store, _exit_barrier_timeout=20)


def leave(around, within):
    """Two machines pass torchrun's last barrier, the second one slowly; the store ends with the first one."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))]
    left = Event()
    second = Slow(dist.TCPStore("127.0.0.1", stores[0].port, timeout=timedelta(seconds=20)), left, within)

    def first():
        SimpleElasticAgent._exit_barrier(agent(0, stores[0]))
        stores.clear()
        left.set()

    with around:
        thread = Thread(target=first)
        thread.start()
        SimpleElasticAgent._exit_barrier(agent(1, second))
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("around", "within", "errors"),
    [(machine_0_leaves_last(), 0.3, 0), (nullcontext(), 20, 1)],
    ids=["dpfuse", "torchrun"],
)
def test_a_machine_that_leaves_late_still_finds_the_store(around, within, errors, caplog):
    with caplog.at_level(logging.ERROR):
        leave(around, within)
    assert [record.message[:27] for record in caplog.records] == ["Error waiting on exit barri"] * errors


def test_a_machine_that_is_lost_does_not_keep_the_first_one(monkeypatch):
    monkeypatch.setattr(shutdown, "LEAVING", timedelta(seconds=0.2))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = SimpleElasticAgent._exit_barrier
    store.add("torchelastic/agent/terminal_state/num_members", 1)
    with machine_0_leaves_last():
        begin = time.monotonic()
        SimpleElasticAgent._exit_barrier(agent(0, store))
        assert 0.2 <= time.monotonic() - begin < patience(10)
    assert SimpleElasticAgent._exit_barrier is barrier
