"""Real ranks for tests: a pool of processes over gloo that run functions, each call under a time limit.

Starting a process costs seconds (it imports torch), so a pool lives as long as the test session. A pool in
which something went wrong is thrown away, since its process group can no longer be trusted.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["RankError", "RankPool"]


class RankError(AssertionError):
    """A function failed, ended or hung on some rank; the text carries every rank's traceback."""


def _serve(rank: int, size: int, store_path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    stacks = open(f"{store_path}-stacks-{rank}", "w")  # noqa: SIM115  # lives as long as the process
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, args = job
        torch.manual_seed(0)
        try:
            pipe.send(("returned", function(rank, size, *args)))
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))
    # A rank that left first would take the connections of the others with it.
    dist.barrier()
    dist.destroy_process_group()


class RankPool:
    """`size` processes, joined in one gloo group, that wait for functions.

    Args:
        size: number of ranks.
        start_method: of `multiprocessing`.

    Example:
        pool = RankPool(2); pool.run(function, "argument"); pool.close()
    """

    def __init__(self, size: int, start_method: str = "spawn") -> None:
        context = multiprocessing.get_context(start_method)
        self.size = size
        self.healthy = True
        self._folder = tempfile.TemporaryDirectory(prefix="dpfuse-test-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, f"{self._folder.name}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(timeout=120)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(rank, size, *args)` on every rank; their results by rank, or `RankError`."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = monotonic() + timeout
        results: list[Any] = [None] * self.size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                failures += [
                    f"rank {rank}: no answer within {timeout} s\n{self._stacks(rank)}" for rank in waiting.values()
                ]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(1)  # else it has no exit code yet
                    kind, value = "ended", f"exit code {self._processes[rank].exitcode}"
                if kind in ("returned", "ready"):
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} {kind}:\n{value}")
                    # The others may wait for this rank for ever; give them a moment to say so themselves.
                    deadline = min(deadline, monotonic() + 5)
        if failures:
            self.kill()
            raise RankError("\n".join(failures))
        return results

    def _stacks(self, rank: int) -> str:
        """Where a rank is that does not answer."""
        process = self._processes[rank]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(0.5)  # the handler writes at once
        path = Path(f"{self._folder.name}/store-stacks-{rank}")
        return path.read_text() if path.exists() else f"{path} is gone"

    def kill(self) -> None:
        self.healthy = False
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def close(self) -> None:
        if not self.healthy:
            return
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=20)
        self.kill()
