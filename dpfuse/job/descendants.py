"""Processes that the ranks of a job have started, such as the workers of a DataLoader. Reads /proc: Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLEANUP_SECONDS", "Descendant", "descendants", "kill_descendants"]

# Seconds for processes that end by themselves after their rank: helpers still remove files or shared memory.
CLEANUP_SECONDS = 1.0


@dataclass(frozen=True)
class Descendant:
    """A process, identified by number and start time: the number alone may be used again."""

    pid: int
    started: str

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return _started(self.pid) == self.started


def _started(pid: int) -> str:
    """Return when the process was started, in the kernel's count; empty if it has ended."""
    try:
        # The name, in parentheses, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def descendants(pids: Iterable[int]) -> set[Descendant]:
    """Return all descendants of the processes `pids`; empty on a system without /proc."""
    found = list(pids)
    given = len(found)
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return {Descendant(pid, _started(pid)) for pid in found[given:]}


def kill_descendants(processes: Iterable[Descendant]) -> None:
    """Kill the processes that still run after `CLEANUP_SECONDS`."""
    running = [process for process in processes if process.running]
    deadline = time.monotonic() + CLEANUP_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        running = [process for process in running if process.running]
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
