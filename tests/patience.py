"""How long a test waits on a machine that has other work to do.

A time-out tells a hang from a slow machine, and an upper bound tells "at once" from "after a time-out". Both depend on
how much of a core a process gets, so they grow with the processes that want one.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["patience"]


def patience(seconds: float) -> float:
    """Return these seconds, or more of them where many processes wait for a core now, or did in the last minute.

    The tests' own ranks count as well, so up to three processes for each core change nothing.
    """
    return seconds * max(1.0, _wanting() / (os.cpu_count() or 1) - 2)


def _wanting() -> float:
    """The number of processes that run or wait for a core."""
    last_minute = os.getloadavg()[0]
    try:  # which follows sudden load only slowly
        return max(last_minute, int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
    except OSError:
        return last_minute
