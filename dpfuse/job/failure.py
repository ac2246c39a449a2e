"""Which rank failed first, and why, according to exit codes and the records of the ranks. Imports no torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["RankFailure", "first_failure", "read_record"]

# Peers of a killed rank fail within milliseconds. torchrun notices both at once, and counts whole seconds.
SECONDARY_SECONDS = 2.0


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended."""

    rank: int
    pid: int
    exit_code: int  # -n if signal n ended it, as in Python's process objects
    seen: float  # seconds since the epoch at which it raised, or at which its end was noticed
    error: str = ""  # "ValueError: …"; empty if it left no record (killed, os._exit, not Python)
    traceback: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code as a shell shows it: 128 + n for signal n."""
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
    """Return the failure that caused the others.

    A rank with a record failed at the time of its exception. A rank without a record ended suddenly. If its end was
    noticed no later than two seconds after the first exception, it is the cause, and the exception ("connection
    closed") is secondary. SIGTERM without a record means that the launcher ended the rank.

    Args:
        failures: at least one.

    Example: rank 0 raises "connection closed" at 5.0 s, the launcher sees at 5.1 s that SIGKILL has killed rank 1 ->
    rank 1.
    """
    told = sorted((f for f in failures if f.error), key=lambda f: f.seen)
    sudden = sorted((f for f in failures if not f.error and f.exit_code != -signal.SIGTERM), key=lambda f: f.seen)
    if told and sudden:
        return sudden[0] if sudden[0].seen <= told[0].seen + SECONDARY_SECONDS else told[0]
    return (told or sudden or sorted(failures, key=lambda f: f.seen))[0]


@dataclass(frozen=True)
class Record:
    """What a rank has written about its own exception."""

    seen: float
    error: str
    traceback: str
    exit_code: int = 1  # with which the process would have ended by itself

    def explains(self, failure: RankFailure) -> RankFailure:
        """Return `failure`, which is of the same rank, with the facts of this record."""
        ended_by_launcher = failure.exit_code == -signal.SIGTERM
        code = self.exit_code if ended_by_launcher else failure.exit_code
        return replace(failure, exit_code=code, seen=self.seen, error=self.error, traceback=self.traceback)


def read_record(path: str) -> Record | None:
    """Return the record at `path`; None if there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)["message"]
        extra = message["extraInfo"]
        seen = float(extra.get("seen", extra["timestamp"]))
        return Record(seen, str(message["message"]), str(extra["py_callstack"]), int(extra.get("exit_code", 1)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
