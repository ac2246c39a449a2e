"""How a launcher ends its ranks, and then itself.

It asks the ranks to end, waits for some seconds, then kills them and all processes that they have started. signals.py
says which signals ask for it, and this file makes torchrun follow that. After a failure torchrun gives a rank that
ignores SIGTERM 30 seconds, whatever its `--shutdown_timeout` says. It does not end the processes that a dead rank has
started, such as the workers of a DataLoader. Imported only when a job starts, because `import torch` does not import
torchrun.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
from torch.distributed.elastic.multiprocessing import api as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

from dpfuse.job.descendants import CLEANUP_SECONDS
from dpfuse.job.signals import Signals, held_for_ranks

__all__ = ["machine_0_leaves_last", "ranks_end_within", "silent_after_interrupt"]

LEAVING = timedelta(seconds=5)  # for which machine 0 waits for the others, when all ranks have ended


def _kill_groups(leaders: list[int]) -> None:
    """Kill what is left of the process groups that the ranks lead; a group exists until its last process ends."""
    deadline = time.monotonic() + CLEANUP_SECONDS
    while leaders:
        late = time.monotonic() > deadline
        for leader in leaders.copy():
            try:
                os.killpg(leader, signal.SIGKILL if late else 0)
            except (ProcessLookupError, PermissionError):
                leaders.remove(leader)
        if late:
            return
        time.sleep(0.02)


@contextmanager
def ranks_end_within(seconds: float, signals: Signals, *, hold: bool, records: list[str]) -> Iterator[None]:
    """Give torchrun's ranks `seconds` to end after they are asked to, whatever the reason.

    Signals that ask for it leave torchrun alone: it goes on to supervise the ranks, and waits for other machines when
    its own ranks have ended. The processes that ranks have started are killed after them, unless all ranks ended well.

    Args:
        seconds: for the ranks.
        signals: entered; passes on to the ranks what the launcher gets.
        hold: whether the ranks keep SIGUSR1 and SIGUSR2 for their programs.
        records: gets the paths at which the ranks that were started last record an error.
    """
    close = SubprocessContext._close
    start: Any = SubprocessContext._start
    restart: Any = SimpleElasticAgent._restart_workers
    raises: Any = torchrun._terminate_process_handler

    def handle(number: int, frame: FrameType | None) -> None:
        if not signals.acts_on(number):
            raises(number, frame)

    def start_and_tell(self: SubprocessContext) -> None:
        signals.ranks_start()
        with held_for_ranks() if hold else nullcontext():
            start(self)
        records[:] = self.error_files.values()
        signals.ranks_started([handler.proc for handler in self.subprocess_handlers.values()])

    def close_in_time(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 0) -> None:
        ranks = [handler.proc for handler in self.subprocess_handlers.values()]
        try:
            if signals.asked is None:
                close(self, death_sig, int(seconds))
            else:  # they were asked, and another SIGTERM may end a rank that saves a checkpoint
                signals.wait_for(ranks)
                close(self, signal.SIGKILL, int(seconds))
        finally:
            if signals.asked is not None or any(rank.poll() != 0 for rank in ranks):
                _kill_groups([rank.pid for rank in ranks])

    def restart_unless_asked(self: SimpleElasticAgent, group: WorkerGroup) -> None:
        signals.ranks_restart()
        if signals.asked is not None:
            raise SignalException(f"got {signals.asked.name}", signals.asked)
        restart(self, group)

    with (
        patch.object(torchrun, "_terminate_process_handler", handle),
        patch.object(SubprocessContext, "_start", start_and_tell),
        patch.object(SubprocessContext, "_close", close_in_time),
        patch.object(SimpleElasticAgent, "_restart_workers", restart_unless_asked),
    ):
        yield


@contextmanager
def silent_after_interrupt(signals: Signals) -> Iterator[None]:
    """Let torchrun log nothing of its ranks once a Ctrl-C has ended them."""
    log = logging.getLogger(torchrun.__name__)

    def passes(record: logging.LogRecord) -> bool:
        return signals.asked != signal.SIGINT

    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)


@contextmanager
def machine_0_leaves_last() -> Iterator[None]:
    """Keep the store of a job until every machine knows that all have ended. For torchrun's static rendezvous.

    torchrun's machine 0 ends, and its store with it, as soon as it has passed the last barrier. A machine that still
    reads the store there prints a broken connection, although the job has ended well.
    """
    barrier: Any = SimpleElasticAgent._exit_barrier

    def pass_and_leave(self: SimpleElasticAgent) -> None:
        barrier(self)
        store: Any = self._store
        rank: Any = self._worker_group.group_rank
        others = [f"dpfuse/left/{other}" for other in range(1, self._worker_group.group_world_size or 1)]
        with suppress(dist.DistError):  # a machine that is lost does not keep this one
            if rank == 0:
                store.wait(others, LEAVING)
            else:
                store.set(others[rank - 1], "")  # the store sends no answer, so none can be missed

    with patch.object(SimpleElasticAgent, "_exit_barrier", pass_and_leave):
        yield
