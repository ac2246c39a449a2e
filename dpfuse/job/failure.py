"""Which rank failed first, and why, by what the ranks left behind. Knows no process, imports no torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["RankFailure", "first_failure", "read_record"]

# Peers of a killed rank fail within milliseconds; torchrun notices both in one look and counts whole seconds.
ECHO_SECONDS = 2.0


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended."""

    rank: int
    pid: int
    exit_code: int  # -n where signal n ended it, as Python's process objects say it
    seen: float  # seconds since the epoch at which it raised, or at which its end was noticed
    error: str = ""  # "ValueError: …"; empty where it left no record (killed, os._exit, not Python)
    traceback: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code as shells give it: 128 + n for signal n."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    def __str__(self) -> str:
        where = f"rank {self.rank} (pid {self.pid})"
        if self.error and self.error != f"SystemExit: {self.exit_code}":
            return f"{where} raised {self.error}"
        if self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = f"signal {-self.exit_code}"
            return f"{where} was killed by {name}"
        return f"{where} ended with exit code {self.exit_code}"


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """The cause among `failures` (at least one); the others are its echo.

    A rank that left a record is placed by the time of its exception. One that left none died suddenly: if
    it was seen dead when the first exception came, its death is the cause and that exception ("connection
    closed") the echo. SIGTERM without a record is how a launcher ends the others.

    Example: rank 0 raises "connection closed" at 5.0 s, rank 1 is seen killed by SIGKILL at 5.1 s -> rank 1.
    """
    told = sorted((f for f in failures if f.error), key=lambda f: f.seen)
    sudden = sorted((f for f in failures if not f.error and f.exit_code != -signal.SIGTERM), key=lambda f: f.seen)
    if told and sudden:
        return sudden[0] if sudden[0].seen <= told[0].seen + ECHO_SECONDS else told[0]
    return (told or sudden or sorted(failures, key=lambda f: f.seen))[0]


@dataclass(frozen=True)
class Record:
    """What a rank wrote about its own exception."""

    seen: float
    error: str
    traceback: str
    exit_code: int = 1  # of the process, had nobody ended it meanwhile

    def explains(self, failure: RankFailure) -> RankFailure:
        """`failure` of the same rank, with what this record adds."""
        ended_on_its_way = failure.exit_code == -signal.SIGTERM
        code = self.exit_code if ended_on_its_way else failure.exit_code
        return replace(failure, exit_code=code, seen=self.seen, error=self.error, traceback=self.traceback)


def read_record(path: str) -> Record | None:
    """The record at `path`, or None where there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)["message"]
        extra = message["extraInfo"]
        seen = float(extra.get("seen", extra["timestamp"]))
        return Record(seen, str(message["message"]), str(extra["py_callstack"]), int(extra.get("exit_code", 1)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
