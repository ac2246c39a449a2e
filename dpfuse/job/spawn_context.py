"""The result of `spawn`: the running ranks, how they end, what they return. Starts nothing."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import weakref
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, ProcessException

from dpfuse.arguments import real
from dpfuse.errors import DPFuseError
from dpfuse.job.descendants import Descendant, descendants, kill_descendants
from dpfuse.job.failure import RankFailure, explained, first_failure, shown

__all__ = ["RankError", "RankFolder", "ReturnQueue", "SpawnContext", "began_path", "error_path", "result_path"]

# After a rank fails, its peers get this time to end by themselves, then the same after SIGTERM; then comes SIGKILL.
GRACE_SECONDS = 2.0
POLL_SECONDS = 2.0  # between two searches for processes that the ranks have started

# A context must live as long as its ranks, because it serves their store; the caller may not keep it.
_running: set[SpawnContext] = set()


class RankError(DPFuseError):
    """A rank that was spawned has failed: `failure` is that of the first. A pickled error does not keep it."""

    def __init__(self, text: str, failure: RankFailure | None = None) -> None:
        super().__init__(text)
        self.failure = failure


class RankFolder:
    """A folder that only this user can open; the process that made it removes it when this object is collected.

    Not TemporaryDirectory: it warns when it is garbage-collected, and a forked rank that drops its copy would empty
    the folder of all ranks.
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="dpfuse-spawn-")  # mkdtemp gives it mode 0700
        weakref.finalize(self, _remove, self.name, os.getpid())


def _remove(name: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(name, ignore_errors=True)


def result_path(folder: str, rank: int) -> Path:
    """Return the path of the file in which a rank leaves the value that func returned."""
    return Path(folder, f"result-{rank}.pickle")


def began_path(folder: str, rank: int) -> Path:
    """Return the path of the empty file that a rank makes before it calls func."""
    return Path(folder, f"began-{rank}")


def error_path(folder: str, rank: int) -> str:
    """Return the path of the file in which a rank records its exception."""
    return os.path.join(folder, f"error-{rank}.json")


class ReturnQueue:
    """Holds the value that func returned on one rank; `get()` may be called any number of times.

    It reads a file and not a pipe: so a rank with a large result can end before its result is read.
    """

    def __init__(self, process: Any, rank: int, folder: RankFolder) -> None:
        self._process = process
        self._rank = rank
        self._folder = folder  # must exist as long as this queue

    def get(self) -> Any:
        """Wait until the rank has ended, and return the value.

        Raises:
            DPFuseError: the rank ended without a value.
        """
        self._process.join()
        path = result_path(self._folder.name, self._rank)
        if not path.exists():
            code = self._process.exitcode
            hint = "Call join() on the context to see its error." if code else "func ended it, and did not return."
            raise DPFuseError(f"rank {self._rank} left no return value: it ended with exit code {code}. {hint}")
        return pickle.loads(path.read_bytes())


class SpawnContext:
    """The running ranks of one `spawn`.

    Attributes:
        processes: the process of each rank, by rank.
        return_queues: for each rank a queue whose `get()` gives func's return value there.
    """

    def __init__(self, context: ProcessContext, folder: RankFolder, store: object) -> None:
        self._context = context
        self._folder = folder
        self._store = store
        self.processes: list[Any] = list(context.processes)
        # torch unpickles the tracebacks of ranks from a folder that every user can write to. These paths do not exist:
        # the ranks leave their tracebacks as text in `folder`.
        context.error_files = [os.path.join(folder.name, "none") for _ in self.processes]
        self._started: dict[int, set[Descendant]] = {}  # by pid of the rank, as of the last search
        self.return_queues = [ReturnQueue(process, rank, folder) for rank, process in enumerate(self.processes)]
        _running.add(self)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until some rank ends; when one has failed, end the others and raise.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Returns:
            True if all ranks have ended well, False while some still run. Call it in a loop, as in Paddle and
            torch.

        Raises:
            DPFuseError: a rank failed. The text names the rank that failed first and shows its traceback. The
                error's `__cause__` is torch's ProcessExitedException for the rank that torch saw end first; that
                may be a peer whose connection was closed.
            TypeError: `timeout` is no number.
            KeyboardInterrupt: the user pressed Ctrl-C; the ranks were ended.
        """
        if timeout is not None:
            real("timeout", timeout, "a number of seconds, or None")
        try:
            self._watch(timeout)
            done = self._context.join(0, grace_period=GRACE_SECONDS)
        except ProcessException as error:
            kill_descendants(set().union(*self._started.values()))
            self._close()
            first = self._first(error)
            if first.error.startswith("SystemExit"):
                first = replace(first, traceback="")  # its text says all
            first = shown(first)
            trace = f"\n\n{first.traceback}" if first.traceback else ""
            hint = ""
            if not first.error and first.exit_code > 0:
                hint = (
                    " in func, without an exception (os._exit() does that); its own output above may say why"
                    if began_path(self._folder.name, first.rank).exists()
                    else " before func; its own output above says why (is the call under `if __name__ == '__main__':`?)"
                )
            raise RankError(
                f"spawn: {first}{hint}; it was the first of {len(self.processes)} ranks to fail, and the others "
                f"were ended.{trace}",
                first,
            ) from error
        except BaseException:
            # Mostly Ctrl-C. Python waits at its own end for the ranks, so they must end.
            self._end()
            raise
        if done:
            self._close()
        return bool(done)

    def _watch(self, timeout: float | None) -> None:
        """Wait until some rank ends, and meanwhile record which processes the ranks have started.

        The descendants of a rank cannot be found after it has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._context.sentinels:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            ended = wait(self._context.sentinels, max(0.0, left))
            for process in self.processes:
                known = {each for each in self._started.get(process.pid, ()) if each.running}
                self._started[process.pid] = known | descendants([process.pid])
                if process.exitcode and process.sentinel not in ended:
                    # Its forks, such as workers, keep the pipe open that signals its end.
                    kill_descendants(self._started[process.pid])
            if ended or left < POLL_SECONDS:
                return

    def _end(self) -> None:
        started = descendants(process.pid for process in self.processes).union(*self._started.values())
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also at another Ctrl-C, which ends the waiting
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            kill_descendants(started)
            self._close()

    def _close(self) -> None:
        self._store = None
        _running.discard(self)

    def _first(self, error: Any) -> RankFailure:
        # torch waits GRACE_SECONDS for the peers before it sends a signal itself.
        before_signals = time.time() - GRACE_SECONDS
        failures = []
        for rank, process in enumerate(self.processes):
            ended = RankFailure(rank, process.pid, process.exitcode, before_signals)
            failure = explained(ended, error_path(self._folder.name, rank))
            if failure is ended and rank == error.error_index:
                # The processes are watched without a pause, so a sudden end that was noticed first also came first.
                return failure
            if failure.exit_code != 0:
                failures.append(failure)
        return first_failure(failures)
