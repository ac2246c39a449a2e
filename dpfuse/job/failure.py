"""Which rank failed first, and why, according to exit codes and the records of the ranks. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["RankFailure", "explained", "first_failure", "shown"]

# Peers of a killed rank fail within milliseconds. torchrun notices both at once, and counts whole seconds.
SECONDARY_SECONDS = 2.0
ELSEWHERE = "the error there"  # in the error of a rank that has heard of another rank's failure, as all peers do
MOST_BYTES = 20 * 1024  # of a message, and of a traceback, in an error
BEGINNING = 200  # bytes of a message that was shown already
FIRST_PART = 5 * 1024  # bytes of a traceback that stay before the cut; the others stay after it
# A terminal would obey control characters. Half a surrogate pair is refused by nearly everything that takes a text.
UNFIT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


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
    """Return the one of `failures`, at least one, that caused the others.

    A rank with a record failed at the time of its exception. A rank without a record ended suddenly. If its end was
    noticed no later than two seconds after the first exception, it is the cause, and the exception ("connection
    closed") is secondary. An error that refers to that of another rank is secondary, too, even if it comes first: all
    ranks raise in the same backward. SIGTERM without a record means that the launcher ended the rank.

    Example: rank 0 raises "connection closed" at 5.0 s, the launcher sees at 5.1 s that SIGKILL has killed rank 1 ->
    rank 1.
    """
    told = sorted((f for f in failures if f.error), key=lambda f: (ELSEWHERE in f.error, f.seen))
    sudden = sorted((f for f in failures if not f.error and f.exit_code != -signal.SIGTERM), key=lambda f: f.seen)
    if told and sudden:
        return sudden[0] if sudden[0].seen <= told[0].seen + SECONDARY_SECONDS else told[0]
    return (told or sudden or sorted(failures, key=lambda f: f.seen))[0]


def shown(failure: RankFailure, folder: str | None = None) -> RankFailure:
    """Return `failure` with texts that fit into an error: at most 20 KB each, without control characters.

    If something is cut, the whole text goes into a new file, and the shown text names it. The file belongs to the user.

    Args:
        failure: of the rank that an error names.
        folder: None takes the system's folder for temporary files.
    """
    error, trace = _fit(failure.error), _fit(failure.traceback)
    long_error, long_trace = (len(text.encode()) > MOST_BYTES for text in (error, trace))
    if not (long_error or long_trace):
        return replace(failure, error=error, traceback=trace)
    place = _saved(failure, folder)
    if long_error:
        # A traceback ends with the message, after the type and its module.
        _, _, message = error.partition(": ")
        if message:
            trace = trace.replace(message, f"{_first(message, BEGINNING)} … [see above]")
        error = f"{_first(error, MOST_BYTES)} … [{_size(MOST_BYTES)} of {_size(len(error.encode()))}; {place}]"
    return replace(failure, error=error, traceback=_without_middle(trace, place))


def _fit(text: str) -> str:
    return UNFIT.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _first(text: str, most: int) -> str:
    """Return the beginning of `text`, of at most so many bytes, without half a character at its end."""
    return text.encode()[:most].decode(errors="ignore")


def _without_middle(text: str, place: str) -> str:
    data = text.encode()
    if len(data) <= MOST_BYTES:
        return text
    begin, end = data[:FIRST_PART], data[FIRST_PART - MOST_BYTES :]
    cut = f" … [{_size(len(data) - MOST_BYTES)} are left out; {place}] … "
    return f"{begin.decode(errors='ignore')}{cut}{end.decode(errors='ignore')}"


def _size(count: int) -> str:
    return f"{count / 1024:.0f} KB"


def _saved(failure: RankFailure, folder: str | None) -> str:
    """Save the whole text, and return where it is, for a sentence."""
    whole = failure.traceback if failure.error in failure.traceback else f"{failure.error}\n\n{failure.traceback}"
    try:
        # mkstemp gives it mode 0600.
        number, path = tempfile.mkstemp(prefix=f"dpfuse-error-of-rank-{failure.rank}-", suffix=".txt", dir=folder)
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(whole)
    except OSError as problem:
        return f"the whole text could not be saved: {problem}"
    return f"the whole text is in {os.path.abspath(path)}"


def explained(failure: RankFailure, path: str) -> RankFailure:
    """Return `failure` with what its rank has recorded at `path`; `failure` itself if there is no record to read."""
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)["message"]
        extra = message["extraInfo"]
        seen = float(extra.get("seen", extra["timestamp"]))
        error, traceback = str(message["message"]), str(extra["py_callstack"])
        own_code = int(extra.get("exit_code", 1))  # with which the process would have ended by itself
    except (OSError, ValueError, KeyError, TypeError):
        return failure
    code = own_code if failure.exit_code == -signal.SIGTERM else failure.exit_code  # the launcher has ended it
    return replace(failure, exit_code=code, seen=seen, error=error, traceback=traceback)
