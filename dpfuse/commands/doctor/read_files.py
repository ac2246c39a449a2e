"""Notes which files this process reads that it has not written itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from dpfuse.engine.user_line import INSIDE

__all__ = ["ReadFiles"]

# How the paths of files begin that hold no state of a program.
NO_STATE = (*(os.path.join(os.path.realpath(path), "") for path in INSIDE if os.path.isabs(path)), "/proc/", "/sys/")


class ReadFiles:
    """Hears of each file that is opened from now on.

    Attributes:
        paths: of files that were read, without links, in the order of the first read.
    """

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self._written: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        """As an audit hook of Python. It must not raise, and must be quick."""
        if event != "open" or not isinstance(args[0], str):
            return
        path, mode, flags = args
        try:
            path = os.path.realpath(path)  # a link may lead elsewhere in the next run
        except (OSError, ValueError):  # the working folder was removed; the path is none
            return
        writes = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else bool(set(mode or "r") & set("wax+"))
        if writes:
            self._written.add(path)
        elif path not in self._written and not path.startswith(NO_STATE):
            self.paths.setdefault(path)
