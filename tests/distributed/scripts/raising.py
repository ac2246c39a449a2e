"""Raises exceptions of many kinds: as a function for `spawn`, and as a program for the launcher."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import NoReturn

SLEEP = 60.0  # seconds of the rank that does not fail


class Skip(BaseException):
    """Of a user, and no Exception."""


class LongError(Exception):
    """Of a user."""


class NoTextError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class ExitsInTextError(Exception):
    def __str__(self) -> str:
        sys.exit(0)


class NoPickleError(Exception):
    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("no pickling")


class CannotBeRead:
    """An argument that a new process cannot unpickle."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return refuse, ("planted: cannot be read",)


def refuse(text: str) -> NoReturn:
    raise ValueError(text)


# kind: name of the type, text
NO_EXCEPTIONS = {
    "keyboard": ("KeyboardInterrupt", "keyboard-text"),
    "bare keyboard": ("KeyboardInterrupt", ""),
    "generator": ("GeneratorExit", "generator-text"),
    "cancelled": ("CancelledError", "cancelled-text"),
    "own": ("Skip", "skip-text"),
    "exit text": ("SystemExit", "exit-text"),
    "exit list": ("SystemExit", "[1, 2]"),
    "exit 0.0": ("SystemExit", "0.0"),
    "exit -1": ("SystemExit", "-1"),
}
ENDS_WELL = ["exit None", "exit 0", "exit False", "exit 256", "_exit 0"]
UNUSUAL = {
    "no str": ("raised NoTextError: <str() of it raised ZeroDivisionError>", "in fails_with"),
    "exits in str": ("raised ExitsInTextError: <str() of it raised SystemExit>",),
    "no pickle": ("raised NoPickleError: pickle-text", "in fails_with"),
    "characters": (r"raised ValueError: odd-text \udcff \x00 \x1b[31m \r", "in fails_with"),
    "deep": ("raised RecursionError: maximum recursion depth exceeded", "more times"),
    "no text": ("raised ValueError; it was",),
    "cause": ("raised KeyError: 'cause-text'", "ZeroDivisionError", "direct cause"),
}
if sys.version_info >= (3, 11):
    UNUSUAL["group"] = ("raised ExceptionGroup: group-text (2 sub-exceptions)", "ValueError: a", "KeyError: 'b'")
    UNUSUAL["notes"] = ("raised ValueError: noted-text", "the note")
    NO_EXCEPTIONS["base group"] = ("BaseExceptionGroup", "group-text (1 sub-exception)")
# kind: beginning, what is repeated, how often
LONG = {
    "long": ("long-text ", "x", 3_000_000),
    "long, two bytes": ("long-text ", "é", 300_000),
    "long, three bytes": ("long-text a", "日", 300_000),
    "long, four bytes": ("long-text ab", "🙂", 300_000),
    "long, lines": ("long-text ", "line\n", 100_000),
    "long of an own class": ("long-text ", "x", 300_000),
}
# kind: a text before the cut, one behind it, one that is in the whole only
LONG_TRACEBACKS = {
    "long cause": ("TypeError: cause-text yyy", "ValueError: last-text", "y" * 300_000),
    "deep and wide": ("in fails_with", "ValueError: last-text", " line_that_is_long" * 3),
}
if sys.version_info >= (3, 11):
    LONG_TRACEBACKS["long note"] = ("in fails_with", "note-end", "z" * 300_000)


def one(n: int) -> None:
    if n == 0:
        raise ValueError("last-text")
    two(n - 1, line_that_is_long=" line_that_is_long line_that_is_long line_that_is_long line_that_is_long")


def two(n: int, line_that_is_long: str) -> None:
    one(n)


def deeper(n: int) -> int:
    return deeper(n + 1) + 1


def raise_one(kind: str) -> None:
    if kind.startswith("_exit "):
        os._exit(int(kind.split()[1]))
    if kind in LONG:
        begins, unit, count = LONG[kind]
        raise (LongError if kind == "long of an own class" else ValueError)(begins + unit * count)
    found: BaseException = {
        "keyboard": KeyboardInterrupt("keyboard-text"),
        "bare keyboard": KeyboardInterrupt(),
        "generator": GeneratorExit("generator-text"),
        "cancelled": asyncio.CancelledError("cancelled-text"),
        "own": Skip("skip-text"),
        "exit text": SystemExit("exit-text"),
        "exit list": SystemExit([1, 2]),
        "exit 0.0": SystemExit(0.0),
        "exit -1": SystemExit(-1),
        "exit None": SystemExit(),
        "exit 0": SystemExit(0),
        "exit False": SystemExit(False),
        "exit 256": SystemExit(256),
        "no str": NoTextError("lost"),
        "exits in str": ExitsInTextError("lost"),
        "no pickle": NoPickleError("pickle-text", 5),
        "characters": ValueError("odd-text \udcff \x00 \x1b[31m \r"),
        "no text": ValueError(),
    }.get(kind, Skip("unknown"))
    if kind == "deep":
        deeper(0)
    if kind == "cause":
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            raise KeyError("cause-text") from error
    if kind == "long cause":
        try:
            raise TypeError("cause-text " + "y" * 300_000)
        except TypeError as error:
            raise ValueError("last-text") from error
    if kind == "deep and wide":
        one(400)
    if sys.version_info >= (3, 11):
        if kind == "group":
            raise ExceptionGroup("group-text", [ValueError("a"), KeyError("b")])  # noqa: F821
        if kind == "base group":
            raise BaseExceptionGroup("group-text", [Skip("a")])  # noqa: F821
        if kind in ("notes", "long note"):
            noted = ValueError("noted-text")
            noted.add_note("the note" if kind == "notes" else "z" * 300_000 + "note-end")
            raise noted
    raise found


def fails_with(kind: str) -> None:
    """Fail on every rank, or, after a comma, on rank 1 only."""
    what, _, where = kind.partition(", on ")
    if where and int(os.environ["RANK"]) != 1:
        time.sleep(SLEEP)
    raise_one(what)


if __name__ == "__main__":
    fails_with(sys.argv[1])
