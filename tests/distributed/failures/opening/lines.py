"""Raises at the n-th line of the library that the calling thread runs. Knows no model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import dpfuse
import dpfuse_kernels
from dpfuse.engine.autograd import backward_runs

__all__ = ["Line", "Lines", "Passed"]

LIBRARY = Path(dpfuse.__file__).parent
FOLDERS = f"{LIBRARY}/", f"{Path(dpfuse_kernels.__file__).parent}/"
EXCHANGES = {f"{LIBRARY}/comm/{name}.py" for name in ("collective", "waiting", "work")}
VOTES = f"{LIBRARY}/comm/votes.py"
BUCKET = f"{LIBRARY}/engine/bucket.py"
# The functions that run the vote on the buckets: between its collectives, they do nothing that fails.
VOTING = {(f"{LIBRARY}/engine/bucket_maker.py", name) for name in ("agree", "_agreed_buckets")}


class Line(NamedTuple):
    """One line that was passed.

    Attributes:
        place: its file, number and function.
        exchanging: whether it belongs to an exchange, of which it is unknown how far it came.
        voting: whether it lies between the exchanges of one vote, where nothing fails but by an interrupt.
    """

    place: str
    exchanging: bool
    voting: bool = False


@dataclass
class Passed:
    """What was passed, up to the failure.

    Attributes:
        lines: all lines that were counted; where one was to raise, only that line.
        raised: whether something has raised.
        dropped: whether Python has dropped that, as it does in a finalizer.
    """

    lines: list[Line] = field(default_factory=list)
    raised: bool = False
    dropped: bool = False


class Lines:
    """Raises at line number `at`, from 1, of what runs within `traced()`; None raises nowhere, and notes the lines.

    Args:
        passed: is told.
        at: number of the line.
        error: makes what is raised.
        inside: whether only lines count that run inside a backward. Torch calls others in front of it, before a hook of
            the library runs.
    """

    def __init__(self, passed: Passed, at: int | None, error: Callable[[], BaseException], inside: bool) -> None:
        self._passed = passed
        self._at = at
        self._error = error
        self._inside = inside
        self._count = 0
        self._known: dict[str, bool] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Count the lines of what is called within."""
        before, sys.unraisablehook = sys.unraisablehook, self._dropped
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            sys.unraisablehook = before

    def _dropped(self, what: object) -> None:
        self._passed.dropped = True

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._known:
            self._known[file] = file.startswith(FOLDERS)
        return self._line if self._known[file] and (backward_runs() or not self._inside) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        passed = self._passed
        if event == "line" and not passed.raised:
            self._count += 1
            if self._at is None:
                passed.lines.append(_line_of(frame))
            elif self._count == self._at:
                passed.lines.append(_line_of(frame))
                passed.raised = True
                raise self._error()
        return self._line


def _line_of(frame: FrameType) -> Line:
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    code = frame.f_code
    voting = code.co_filename == VOTES or (code.co_filename, code.co_name) in VOTING
    return Line(f"{file}:{frame.f_lineno} {code.co_name}", _exchanges(frame), voting)


def _exchanges(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_filename in EXCHANGES and code.co_name != "tell":
            return True
        if code.co_filename == BUCKET and code.co_name == "_start":
            return True
        if code.co_filename == VOTES:  # what a vote is about is made in it, between its collectives
            return False
        frame = frame.f_back
    return False
