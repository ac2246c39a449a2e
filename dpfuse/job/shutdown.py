"""How the launcher ends ranks: asks, waits for some seconds, then kills them and whatever they started.

torchrun gives a rank that ignores SIGTERM 30 seconds where a peer has failed, whatever its `--shutdown_timeout` says,
and leaves the processes that a dead rank had started, such as the workers of a DataLoader. Imported only when a job
is started: torchrun is not part of `import torch`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from dpfuse.job.descendants import CLEANUP_SECONDS

__all__ = ["ranks_end_within"]


def _kill_groups(leaders: list[int]) -> None:
    """Each rank leads a group of its own, which lasts as long as anybody in it."""
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
def ranks_end_within(seconds: int) -> Iterator[None]:
    """In this context, torchrun's ranks get so many seconds to end once they are asked to, in every case.

    A second signal, such as Ctrl-C again, while they are waited for ends them at once. What a rank has started is
    killed after it, unless all ranks ended well.
    """
    close = SubprocessContext._close

    def close_in_time(self: SubprocessContext, death_sig: signal.Signals, timeout: int = 0) -> None:
        try:
            close(self, death_sig, seconds)
        finally:
            ranks = [handler.proc for handler in self.subprocess_handlers.values()]
            if any(rank.poll() != 0 for rank in ranks):
                _kill_groups([rank.pid for rank in ranks])

    with patch.object(SubprocessContext, "_close", close_in_time):
        yield
