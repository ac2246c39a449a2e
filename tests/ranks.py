"""Real ranks for tests: a pool of processes over gloo that run functions, each call under a time limit.

A pool lives as long as the test session. A pool in which something went wrong is thrown away, since its process group
can no longer be trusted. Importing torch costs seconds, so the processes are forks of one that has imported it.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.distributed.processes import ROOT
from tests.patience import patience
from tests.warm import warm_python

__all__ = ["RankError", "RankPool", "pools_by_size"]

MANY = 12  # groups of a process


class RankError(AssertionError):
    """A function failed, ended or hung on some rank; the text carries every rank's traceback."""


def _serve(rank: int, size: int, store_path: str) -> None:
    import torch
    import torch.distributed as dist

    pipe = Connection(os.dup(0))  # what reads the standard input shall not take what is meant for us
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    stacks = open(f"{store_path}-stacks-{rank}", "w")  # noqa: SIM115  # lives as long as the process
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    faulthandler.enable(stacks, all_threads=True)
    # With the key of the tests, tensors can be passed on, which are sent as open files.
    sys.path[:], current_process().authkey = pipe.recv()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    pipe.send(("ready", os.getpid()))
    known = 0
    while (job := _received(pipe)) is not None:
        function, args = job
        # Each group that a test has made has threads of gloo and of the heartbeat, which take time from later tests.
        # All ranks have answered, so no peer needs it. Those of meshes stay, since torch keeps meshes in caches; where
        # they are many, the pool is replaced.
        groups = [each for each in dist.distributed_c10d._world.pg_map if each is not dist.group.WORLD]
        for group in groups:
            if not group.group_desc.startswith("mesh"):
                dist.destroy_process_group(group)
        if len(sys.modules) > known:  # what was imported stays, so no collection need look at it again
            gc.collect()
            gc.freeze()
            known = len(sys.modules)
        torch.manual_seed(0)
        try:
            result = function(rank, size, *args)
            pipe.send(("crowded" if len(dist.distributed_c10d._world.pg_map) > MANY else "returned", result))
            del result
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))
        for each in args:  # pytest undoes what its own process has patched, and this is a copy
            if isinstance(each, pytest.MonkeyPatch):
                each.undo()
        # Models are in cycles, and each that is left would take part in every step of the tests that follow.
        del job, function, args
        _forget_failed()
        gc.collect()
    # A rank that left first would take the connections of the others with it.
    dist.barrier()
    dist.destroy_process_group()


def _forget_failed() -> None:
    """Let go of models whose backward has failed at the end of a test: the ranks complete nothing of it any more."""
    if (module := sys.modules.get("dpfuse.engine.send_order")) is not None:
        for turns in module._groups.values():
            turns.failed.clear()


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the tests have ended without a word
        os._exit(1)


class RankPool:
    """`size` processes, joined in one gloo group, that wait for functions.

    Args:
        size: number of ranks.
        preload: a module that the processes have imported from the beginning.

    Example:
        pool = RankPool(2); pool.run(function, "argument"); pool.ask_to_end(); pool.close()
    """

    def __init__(self, size: int, preload: str = "tests.preload") -> None:
        self.size = size
        self.healthy = True
        self.crowded = False  # whether it has many groups, so that another pool is faster
        self._folder = tempfile.TemporaryDirectory(prefix="dpfuse-test-")
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            ours, theirs = Pipe()
            words = ["-m", "tests.ranks", str(rank), str(size), f"{self._folder.name}/store"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
            with theirs:
                process = subprocess.Popen(
                    [warm_python(preload), *words], stdin=theirs.fileno(), env=environment, cwd=ROOT
                )
            ours.send((sys.path, bytes(current_process().authkey)))
            self._pipes.append(ours)
            self._processes.append(process)
        self._last = "its start"
        self._pids: list[int] = []
        self._pids = self._collect(timeout=120)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(rank, size, *args)` on every rank; their results by rank, or `RankError`."""
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send((function, args))
                except BrokenPipeError:
                    code = self._processes[rank].wait(patience(10))
                    text = f"rank {rank} ended after {self._last}, with exit code {code}\n{self._stacks(rank)}"
                    raise RankError(text) from None
            self._last = f"{function.__module__}.{function.__qualname__} had returned"
            return self._collect(timeout)
        except BaseException:
            self.kill()  # answers may be left in the pipes
            raise

    def _collect(self, timeout: float) -> list[Any]:
        began, deadline = monotonic(), inf
        results: list[Any] = [None] * self.size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), timeout=1.0)
            if not ready and monotonic() < min(deadline, began + patience(timeout)):
                continue
            if not ready:
                failures += [
                    f"rank {rank}: no answer within {timeout} s\n{self._stacks(rank)}" for rank in waiting.values()
                ]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):  # the second one if it has not read what it was sent
                    kind, value = "ended", f"exit code {self._processes[rank].wait(patience(10))}\n{self._stacks(rank)}"
                if kind in ("returned", "crowded", "ready"):
                    results[rank] = value
                    self.crowded |= kind == "crowded"
                else:
                    failures.append(f"rank {rank} {kind}:\n{value}")
                    # The others may wait for this rank for ever; give them a moment to say so themselves.
                    deadline = min(deadline, monotonic() + patience(5))
        if failures:
            self.kill()
            raise RankError("\n".join(failures))
        return results

    def _stacks(self, rank: int) -> str:
        """Where a rank is that does not answer, or was when it ended by a signal."""
        if self._processes[rank].poll() is None and self._pids:
            os.kill(self._pids[rank], signal.SIGUSR1)
            sleep(patience(0.5))  # the handler writes as soon as the process gets a core
        path = Path(f"{self._folder.name}/store-stacks-{rank}")
        return path.read_text() if path.exists() else f"{path} is gone"

    def end_processes(self) -> None:
        """End the ranks; whoever waits for their answers gets a `RankError`."""
        for process in self._processes:
            process.kill()

    def kill(self) -> None:
        self.healthy = False
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.wait()
            pipe.close()
        self._folder.cleanup()

    def ask_to_end(self) -> None:
        """Let the processes end by themselves, while the caller asks other pools."""
        for pipe in self._pipes if self.healthy else ():
            pipe.send(None)

    def close(self) -> None:
        """Wait until the processes have ended that were asked to end."""
        if not self.healthy:
            return
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience(20))
        self.kill()


def pools_by_size() -> Iterator[dict[int, RankPool]]:
    """Give one place for pools, by their number of ranks, and end those that it then has: the body of a fixture."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.ask_to_end()
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
