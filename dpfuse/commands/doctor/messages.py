"""Notes what dpfuse says in this process: its warnings, its log of the loop, and exceptions that end the process."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from dpfuse.commands.doctor.replaced_function import replace
from dpfuse.errors import DPFuseError
from dpfuse.findings import LOOP

__all__ = ["Messages"]

CODE = re.compile(r"DPF-\w+")  # with which a message begins


class Messages:
    """Hears them from now on.

    Args:
        failed: called when an exception ends the process.

    Attributes:
        noted: each message once, by its kind and its text.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self.noted: dict[tuple[str, str], dict[str, str]] = {}
        replace(warnings, "warn", self._warn)
        LOOP.addHandler(_Handler(self._note))
        LOOP.setLevel(min(LOOP.getEffectiveLevel(), logging.INFO))
        replace(sys, "excepthook", self._raised)

    def _note(self, what: str, kind: str, code: str, text: str) -> None:
        self.noted.setdefault((kind, text), {"what": what, "kind": kind, "code": code, "text": text})

    def _warn(
        self, plain: Any, /, message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        """Note each warning of dpfuse, whatever filters the program has set."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith("dpfuse."):
            kind = type(message) if isinstance(message, Warning) else category or UserWarning
            self._note("warning", kind.__name__, getattr(message, "code", ""), str(message))
        plain(message, category, stacklevel + 2, *args, **kwargs)

    def _raised(self, plain: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        code = getattr(error, "code", "") if isinstance(error, DPFuseError) else ""
        where = traceback.extract_tb(trace)
        place = f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
        self._note("error", kind.__name__, code, f"{error}{place}")
        self._failed()
        plain(kind, error, trace)


class _Handler(logging.Handler):
    """Passes on what the checks of the loop log, since it may be meant so.

    Args:
        note: gets what it is, its kind, its code and its text.
    """

    def __init__(self, note: Callable[[str, str, str, str], None]) -> None:
        super().__init__()
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler.emit`."""
        text = record.getMessage()
        code = CODE.match(text)
        self._note("log", record.name, code[0] if code else "", text)
