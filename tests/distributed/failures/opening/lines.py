"""Raises at the n-th line of the library that the calling thread runs, up to a collective. Knows no model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dpfuse
import dpfuse_kernels
from dpfuse.comm import collective

__all__ = ["ERRORS", "Passed", "raising"]

TEXT = "planted"
FOLDERS = f"{Path(dpfuse.__file__).parent}/", f"{Path(dpfuse_kernels.__file__).parent}/"
COLLECTIVES = f"{Path(dpfuse.__file__).parent}/comm/collective.py"
BUCKET = f"{Path(dpfuse.__file__).parent}/engine/bucket.py"
COMM = f"{Path(dpfuse.__file__).parent}/comm/"
STARTING = {*collective.__all__}.difference({"group_device", "resolve_group"})
ERRORS: dict[str, type[BaseException]] = {
    "RuntimeError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
}


@dataclass
class Passed:
    """The lines that were passed.

    Attributes:
        places: file, number and function of each.
        collectives: how many collectives had begun before each.
        exchanging: whether each belonged to an exchange, of which it is unknown how far it came.
        raised: whether one has raised.
    """

    places: list[str] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    exchanging: list[bool] = field(default_factory=list)
    raised: bool = False


@contextmanager
def raising(passed: Passed, at: int | None, error: str, before: int | None = None) -> Iterator[None]:
    """Raise `error` at line number `at`, from 1, of what is called inside; None raises nowhere, and counts.

    If the collective number `before`, from 1, has begun by then, it raises nowhere, either.
    """
    lines = _Lines(passed, at, ERRORS[error], before)
    sys.settrace(lines.called)
    try:
        yield
    finally:
        sys.settrace(None)


class _Lines:
    def __init__(
        self, passed: Passed, at: int | None, error: Callable[[str], BaseException], before: int | None
    ) -> None:
        self._passed = passed
        self._at = at
        self._error = error
        self._before = before
        self._begun = 0  # collectives
        self._known: dict[str, bool] = {}

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The function of `sys.settrace`."""
        code, back = frame.f_code, frame.f_back
        if code.co_filename == COLLECTIVES and code.co_name in STARTING:
            if back is not None and back.f_code.co_filename != COLLECTIVES:
                self._begun += 1
            return None
        if code.co_filename not in self._known:
            self._known[code.co_filename] = code.co_filename.startswith(FOLDERS)
        return self._line if self._known[code.co_filename] else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        passed = self._passed
        if event == "line" and not passed.raised:
            file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
            passed.places.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
            passed.collectives.append(self._begun)
            passed.exchanging.append(_exchanges(frame))
            if len(passed.places) == self._at and (self._before is None or self._begun < self._before):
                passed.raised = True
                raise self._error(TEXT)
        return self._line


def _exchanges(frame: FrameType | None) -> bool:
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(COMM) or (file == BUCKET and name == "_start"):
            return True
        frame = frame.f_back
    return False
