"""What the ranks of a job have started themselves, such as the workers of a DataLoader. By /proc: Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLEANUP_SECONDS", "Descendant", "descendants", "kill_descendants"]

# For what ends by itself once its rank is gone: helpers that still remove files or shared memory.
CLEANUP_SECONDS = 1.0


@dataclass(frozen=True)
class Descendant:
    """A process, told apart from a later one with the same number."""

    pid: int
    started: str

    @property
    def running(self) -> bool:
        return _started(self.pid) == self.started


def _started(pid: int) -> str:
    """When the process was started, as the kernel counts; empty where it has ended."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def descendants(pids: Iterable[int]) -> set[Descendant]:
    """All processes below those given; empty where there is no /proc."""
    found = list(pids)
    given = len(found)
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return {Descendant(pid, _started(pid)) for pid in found[given:]}


def kill_descendants(left: Iterable[Descendant]) -> None:
    """Kill those that still run after a moment."""
    running = [process for process in left if process.running]
    deadline = time.monotonic() + CLEANUP_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        running = [process for process in running if process.running]
    for process in running:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
